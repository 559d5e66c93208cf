"""Form only: does the answer match a pattern, by default `<think>...</think><answer>...</answer>`? Truth is ignored."""

from __future__ import annotations

import re
from typing import Any

THINK_ANSWER = r"(?s)\s*(?:<think>)?(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


def compute_score(
    solution_str: str, ground_truth: Any = None, *, pattern: str = THINK_ANSWER, score: float = 1.0
) -> float:
    """`score` when the whole answer matches `pattern`, otherwise 0."""
    return score if re.fullmatch(pattern, solution_str) else 0.0
