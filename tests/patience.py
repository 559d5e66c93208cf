"""How long work may take before it counts as stuck."""

from __future__ import annotations

import os

_STANDING_BACK = 3.0


def patience(seconds: float) -> float:
    """`seconds` at the ordinary priority. Work done ahead (`tests.ahead`) stands back for tests and shares what is left
    of the cores: it takes three times as long without being stuck."""
    return seconds * (_STANDING_BACK if os.getpriority(os.PRIO_PROCESS, 0) > 0 else 1.0)
