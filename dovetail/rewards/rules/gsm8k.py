"""GSM8K: the number after `####` (strict), or the last number of the answer (flexible)."""

from __future__ import annotations

import re
from typing import Any, Literal

from dovetail.rewards.rules.extract import find_numbers, same_number

Method = Literal["strict", "flexible"]
# Answers end with their result: a solution that lists a hundred candidates is not read from the start.
_TAIL = 300
_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` for the right number, `format_score` for a wrong one, 0 for none."""
    answer = extract_answer(solution_str, method)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    truth = str(ground_truth)
    # Strict: the digits themselves, so that the model learns one form. Flexible: the value.
    correct = answer == truth.replace(",", "") if method == "strict" else same_number(answer, truth)
    return {"score": score if correct else format_score, "acc": float(correct), "pred": answer}


def extract_answer(solution_str: str, method: Method = "strict") -> str | None:
    """The final number as plain digits, or None."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} must be strict or flexible.")
    tail = solution_str[-_TAIL:]
    if method == "flexible":
        numbers = find_numbers(tail)
        return numbers[-1] if numbers else None
    marked = _MARKED.findall(tail)
    return marked[-1].replace(",", "") if marked else None
