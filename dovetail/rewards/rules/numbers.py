"""Numbers as people write them in answers: `$1,234.50`, `-3/4`, `12 %`. Reads; judges nothing."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+"
_NUMBER = re.compile(rf"(?<![\w.])(?:{NUMBER})(?![\w])")


def find_numbers(text: str) -> list[str]:
    """Every number in reading order, without thousands separators. `5-3` holds 5 and 3, not -3."""
    numbers = []
    for match in _NUMBER.finditer(text):
        word = match.group().replace(",", "")
        before = text[: match.start()].rstrip()
        if word.startswith("-") and before and (before[-1].isdigit() or before[-1] == ")"):
            word = word[1:]
        numbers.append(word)
    return numbers


def parse_number(text: str) -> Fraction | None:
    """The exact value of one number, decimal or `a/b`, or None."""
    plain = text.strip().strip("$").replace(",", "").rstrip(".").removesuffix("%").strip()
    match = re.fullmatch(r"(-?\d+(?:\.\d*)?|-?\.\d+)(?:/(-?\d+))?", plain)
    if match is None or (match.group(2) is not None and int(match.group(2)) == 0):
        return None
    return Fraction(match.group(1)) / (int(match.group(2)) if match.group(2) else 1)


def same_number(left: str, right: str) -> bool:
    """Whether both are numbers of the same value."""
    a, b = parse_number(left), parse_number(right)
    return a is not None and a == b
