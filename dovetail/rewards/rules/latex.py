"""Compare two mathematical answers after bringing them to one spelling. No algebra: `x+1` is not `1+x` here.

Used when `math-verify` is not installed. It rather misses an equal answer than accepts a wrong one.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dovetail.rewards.rules.extract import parse_number

_DROPPED = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\quad", r"\displaystyle", r"\big", r"\Big", "~")
# A row break comes first, so that its second backslash is not read as the start of a command (`\\\\ ` in a matrix).
_SPACING = re.compile(r"\\\\|(?:" + "|".join(map(re.escape, _DROPPED)) + r")(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*(\{\s*\\circ\s*\}|\\circ)|\\degree|°")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mbox|operatorname)\s*\{([^{}]*)\}")
# Within them a comma ends an entry, not thousands: `(10,100)` is a pair.
_BRACKETS = ("(", "[", "{", r"\{")
_UNIT = re.compile(
    r"(?<=[\d})])\s*(?:degrees?|cm|mm|km|m|inch(?:es)?|feet|ft|units?|square|sq|hours?|minutes?|seconds?|dollars?|cents?"
    r"|percent|miles?|meters?|points?|pounds?|years?|days?)\b(?:\^\{?\d\}?)?",
    re.IGNORECASE,
)


def same_answer(left: str, right: str) -> bool:
    """Whether two answers agree in value or in normal spelling; lists and intervals entry by entry."""
    a, b = normalize(left), normalize(right)
    if a == b:
        return a != ""
    if (parts_a := _parts(a)) is not None and (parts_b := _parts(b)) is not None:
        same_brackets = (a[0], a[-1]) == (b[0], b[-1])
        entries = zip(parts_a, parts_b, strict=False)
        return same_brackets and len(parts_a) == len(parts_b) and all(same_answer(x, y) for x, y in entries)
    value = _value(a)
    return value is not None and value == _value(b)


def normalize(answer: str) -> str:
    """One spelling: no spaces, no sizing commands, `\\frac{a}{b}`, `\\sqrt{a}`, no units, no leading `x=`."""
    text = answer.strip().strip("$").strip()
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = _DEGREES.sub("", text)
    text = _SPACING.sub(lambda match: match.group() if match.group() == "\\\\" else " ", text)
    text = _TEXT.sub(lambda match: f" {match.group(1)} ", text)
    text = text.replace(r"\%", "").replace("%", "").replace(r"\$", "").replace("$", "")
    text = text.replace(r"\cdot", "*").replace(r"\times", "*").replace(r"\leq", r"\le").replace(r"\geq", r"\ge")
    text = _UNIT.sub("", text)
    if not text.lstrip().startswith(_BRACKETS):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\s+", "", text).rstrip(".").replace("{,}", "")
    text = re.sub(r"^[a-zA-Z](?:\([a-zA-Z]\))?=(?=.)", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)(?=\{)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\d|[a-zA-Z])", r"\\sqrt{\1}", text)
    return text.lower() if re.fullmatch(r"[a-zA-Z]+", text) and len(text) > 1 else text


def _parts(text: str) -> list[str] | None:
    """`(a,b]` as its entries; None for what is no list."""
    if len(text) < 2 or text[0] not in "([{" or text[-1] not in ")]}":
        return None
    parts, depth, start = [], 0, 1
    for i, letter in enumerate(text[1:-1], start=1):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:-1]] if parts else None


def _value(text: str) -> Fraction | None:
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    match = re.fullmatch(r"(\d*)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}", rest)
    if match is None:
        value = parse_number(rest)
        return None if value is None else sign * value
    top, bottom = parse_number(match.group(2)), parse_number(match.group(3))
    if top is None or not bottom:
        return None
    return sign * (int(match.group(1) or 0) + top / bottom)
