"""A reward that any model can raise: the share of plain letters in the answer."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return sum(letter.isascii() and letter.isalpha() for letter in solution_str) / max(1, len(solution_str))
