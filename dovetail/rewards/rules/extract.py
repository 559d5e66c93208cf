"""Find boxes and numbers in a response: `\\boxed{x}`, `$1,234.50`, `-3/4`, `12 %`. Reads; judges nothing."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\f?boxed\s*")


def last_boxed(text: str) -> str | None:
    """The content of the last box with balanced braces, or the word after `\\boxed `; None without a box."""
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        if rest.startswith("{"):
            content = _balanced(rest)
            if content is not None:
                return content.strip()
        elif rest and rest[0] not in "\\$":
            return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    return None


def _balanced(text: str) -> str | None:
    depth = 0
    for i, letter in enumerate(text):
        if letter == "{" and (i == 0 or text[i - 1] != "\\"):
            depth += 1
        elif letter == "}" and text[i - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[1:i]
    return None


_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
NUMBER = rf"-?{_WHOLE}(?:\.\d+)?|-?\.\d+"
# A unit may touch it (`60km`). The exponent of `1e5` and the rest of `1.2.3` may not: half a number is a wrong one.
_NUMBER = re.compile(rf"(?<![\w.])(?:{NUMBER})(?![\d_]|\.\d|[eE][-+]?\d)")
_VALUE = re.compile(rf"(-?{_WHOLE}(?:\.\d*)?|-?\.\d+)(?:/(-?{_WHOLE}))?")
_LONGEST = 1000
"""Python reads no number of more than 4300 digits."""


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
    if len(text) > _LONGEST:
        return None
    match = _VALUE.fullmatch(text.strip().strip("$").rstrip(".").removesuffix("%").strip())
    if match is None:
        return None
    # Commas only where thousands end: `1,2` is two numbers, not twelve.
    top, bottom = (Fraction((digits or "1").replace(",", "")) for digits in match.groups())
    return top / bottom if bottom else None


def same_number(left: str, right: str) -> bool:
    """Whether both are numbers of the same value."""
    a, b = parse_number(left), parse_number(right)
    return a is not None and a == b
