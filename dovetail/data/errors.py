"""What can be wrong with data."""

from __future__ import annotations


class DataError(ValueError):
    """A file, a column or a prompt that cannot be used. The message names it and the way out."""
