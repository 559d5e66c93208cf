"""Words that error messages of every layer share. Imports nothing of the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name that a wrong one most likely means."""
    return next(iter(difflib.get_close_matches(str(name), map(str, known), n=1)), None)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A sentence to put behind another, or nothing: ` Did you mean grpo?`"""
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else ""


def name_some(items: Sequence[str], shown: int = 3) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return f"{', '.join(items[:shown])}{more}"
