"""Read the value side of an override: `1e-6`, `True`, `null`, `'text'`, `["a","b"]`, `{a:1}`, or a bare string.

The grammar is Hydra's as far as launch lines use it. Shell variables are not expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

# No underscores: `2_4` is a pair of bounds, not 24.
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_CLOSING = {"[": "]", "{": "}", "(": ")"}


def parse_value(text: str) -> Any:
    """The value that `text` stands for. Raises ValueError for an unfinished list, mapping or string."""
    text = text.strip()
    if text[:1] in ("[", "{") and not text.startswith("{{"):
        body, rest = _inside_brackets(text)
        if rest:
            raise ValueError(f"{rest!r} is left over after the closing bracket")
        items = [item.strip() for item in split_outside(body, ",")]
        # A trailing comma is not an empty item.
        items = items[:-1] if items[-1] == "" else items
        return [parse_value(item) for item in items] if text[0] == "[" else dict(_pair(item) for item in items)
    if is_quoted(text):
        return unquote(text)
    return _scalar(text)


def is_quoted(text: str) -> bool:
    """Whether one pair of quotes encloses the whole text."""
    return len(text) > 1 and text[0] in "\"'" and text[-1] == text[0] and text[0] not in re.sub(r"\\.", "", text[1:-1])


def unquote(text: str) -> str:
    """The text inside the quotes, with escaped quotes restored."""
    return text[1:-1].replace("\\" + text[0], text[0])


def split_outside(text: str, separator: str) -> list[str]:
    """Cut `text` at every `separator` that is not inside quotes or brackets."""
    cuts = [position for position, letter, closers in _outside_quotes(text) if letter == separator and not closers]
    return [text[start + 1 : end] for start, end in pairwise([-1, *cuts, len(text)])]


def _scalar(text: str) -> Any:
    lowered = text.lower()
    if lowered in _CONSTANTS:
        return _CONSTANTS[lowered]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return text


def _inside_brackets(text: str) -> tuple[str, str]:
    """What the bracket at the start encloses, and what follows it."""
    for position, _, closers in _outside_quotes(text):
        if not closers:
            return text[1:position], text[position + 1 :].strip()
    raise ValueError(f"the closing {_CLOSING[text[0]]!r} is missing")


def _outside_quotes(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Every letter outside quotes with its position, and the brackets that are still to be closed after it."""
    closers: list[str] = []
    quote = ""
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[position - 1] != "\\" else quote
            continue
        if letter in "\"'":
            quote = letter
        elif letter in _CLOSING:
            closers.append(_CLOSING[letter])
        elif closers and letter == closers[-1]:
            closers.pop()
        yield position, letter, closers


def _pair(item: str) -> tuple[str, Any]:
    parts = split_outside(item, ":")
    if len(parts) < 2:
        raise ValueError(f"{item!r} is not a `key: value` pair")
    name = parts[0].strip()
    return (unquote(name) if is_quoted(name) else name), parse_value(":".join(parts[1:]))
