"""Answers that are one number, or a list: the last number said, or the last list said, must be the true one."""

from __future__ import annotations

import re
from typing import Any

from dovetail.rewards.rules.extract import find_numbers, same_number

# From the beginning of a word only: else a long word without a comma is read once for each of its letters.
_LIST = re.compile(r"(?<![\w-])[\w-]+(?:\s*,\s*[\w-]+)+")


def compute_score(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, format_score: float = 0.0
) -> dict[str, Any]:
    """`score` for the right number, `format_score` for another number, 0 for none."""
    numbers = find_numbers(solution_str)
    if not numbers:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    correct = same_number(numbers[-1], str(ground_truth))
    return {"score": score if correct else format_score, "acc": float(correct), "pred": numbers[-1]}


def compute_list_score(solution_str: str, ground_truth: Any, *, partial: float = 0.0) -> dict[str, Any]:
    """1 for the right list; otherwise `partial` times the share of entries in the right place."""
    truth = (
        [entry.strip() for entry in ground_truth.split(",")] if isinstance(ground_truth, str) else list(ground_truth)
    )
    truth = [str(entry).lower() for entry in truth]
    lists = _LIST.findall(solution_str)
    answer = [entry.strip().lower() for entry in lists[-1].split(",")] if lists else solution_str.lower().split()[-1:]
    correct = answer == truth
    placed = sum(a == b for a, b in zip(answer, truth, strict=False)) / max(len(answer), len(truth), 1)
    return {"score": 1.0 if correct else partial * placed, "acc": float(correct), "pred": ", ".join(answer)}
