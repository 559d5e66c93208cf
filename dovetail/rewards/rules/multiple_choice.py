"""Multiple choice: which letter does the answer give? Reads a box, an `Answer:` or the last lone letter."""

from __future__ import annotations

import re
from typing import Any

from dovetail.rewards.rules.extract import last_boxed

# A small letter only where no word follows: "the answer is a prime" names no choice.
_STATED = re.compile(
    r"(?i:\b(?:answer|choice|option)\b\s*(?:is|:|=)*\s*[*\"'(\[]*\s*)([A-J]|[a-j](?![^\S\n]+\w|-))\b(?!['\u2019])"
)
_ALONE = re.compile(r"(?<![\w'\u2019])\(?([A-J])\)?(?![\w'\u2019])")


def compute_score(solution_str: str, ground_truth: Any, *, score: float = 1.0) -> dict[str, Any]:
    """`score` for the right letter, otherwise 0. The truth is a letter, or a number counted from 0."""
    truth = chr(ord("A") + ground_truth) if isinstance(ground_truth, int) else str(ground_truth).strip().strip("().")
    answer = extract_choice(solution_str)
    correct = answer is not None and answer.upper() == truth.upper()
    return {"score": score if correct else 0.0, "acc": float(correct), "pred": answer or ""}


def extract_choice(solution_str: str) -> str | None:
    """The chosen letter in upper case, or None."""
    boxed = last_boxed(solution_str)
    if boxed is not None and (
        inside := _ALONE.findall(boxed.replace(r"\text", " ").replace("{", " ").replace("}", " "))
    ):
        return inside[-1]
    stated = _STATED.findall(solution_str)
    if stated:
        return stated[-1].upper()
    # "A" and "I" are words too; alone on the last line they are choices.
    last_line = solution_str.strip().splitlines()[-1] if solution_str.strip() else ""
    alone = _ALONE.findall(last_line)
    return alone[-1] if alone else None
