"""A reward: right answers count 1, short ones a little more."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], brevity: float = 0.0
) -> dict[str, Any]:
    right = ground_truth in solution_str.split()
    bonus = brevity / (1 + len(solution_str))
    return {"score": float(right) + bonus, "acc": right, "length": len(solution_str)}
