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
