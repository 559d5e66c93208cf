"""How much memory this process has had on the host."""

from __future__ import annotations

import resource
import sys


def peak_resident_gib() -> float:
    """The largest resident set since the process began."""
    # Kibibytes on Linux, bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1024**3
