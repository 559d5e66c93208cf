"""Which metrics docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@cache
def known_metrics() -> tuple[re.Pattern[str], ...]:
    """A pattern for each name in the first column: `*` is anything, `{a,b}` one of them."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return tuple(re.compile(_pattern(name)) for name in names)


def unexplained(metrics: Iterable[str]) -> list[str]:
    """The names that the page does not have."""
    return sorted(
        name for name in metrics if name != "step" and not any(known.fullmatch(name) for known in known_metrics())
    )


def _pattern(name: str) -> str:
    parts = re.split(r"(\*|\{[^}]+\})", name)
    return "".join(
        ".+"
        if part == "*"
        else f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"
        if part[:1] == "{"
        else re.escape(part)
        for part in parts
    )
