"""A reward function in a module of its own: scoring processes import it."""

from __future__ import annotations

from typing import Any


def ascii_share(response: str, answer: str) -> dict[str, Any]:
    return {"score": sum(ord(letter) < 128 for letter in response) / max(1, len(response)), "has": answer in response}
