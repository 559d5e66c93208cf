"""Find what stands in the last `\\boxed{...}` of a text. Does not interpret it."""

from __future__ import annotations

import re

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
