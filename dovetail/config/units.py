"""Units of memory."""

GIB = 1024**3
