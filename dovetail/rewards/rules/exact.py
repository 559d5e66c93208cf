"""Exact match after dropping case, punctuation and articles (several truths may be right), and rules of form alone."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

_TAG = re.compile(r"(?s)<answer>(.*?)</answer>")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
THINK_ANSWER = r"(?s)\s*(?:<think>)?(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


def compute_score(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, normalize: bool = True
) -> dict[str, Any]:
    """Compares what is in the last `<answer>` tag, or the whole answer without one."""
    tagged = _TAG.findall(solution_str)
    answer = (tagged[-1] if tagged else solution_str).strip()
    spell = normalize_text if normalize else str.strip
    correct = any(spell(answer) == spell(str(truth)) for truth in _truths(ground_truth))
    return {"score": score if correct else 0.0, "acc": float(correct), "pred": answer}


def compute_tagged_score(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, format_score: float = 0.0
) -> dict[str, Any]:
    """Search-R1: only what is in an `<answer>` tag counts, and a quarter of it where there are more than ten tags."""
    tagged = _TAG.findall(solution_str)
    if not tagged:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    result = compute_score(solution_str, ground_truth, score=score)
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    if not result["acc"]:
        return {**result, "score": format_score}
    return {**result, "score": score / 4 if tags > 10 else score}


def compute_format_score(
    solution_str: str, ground_truth: Any = None, *, pattern: str = THINK_ANSWER, score: float = 1.0
) -> float:
    """`score` when the whole response has the form of `pattern`, otherwise 0. The truth is ignored."""
    return score if re.fullmatch(pattern, solution_str) else 0.0


def normalize_text(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def _truths(ground_truth: Any) -> Sequence[Any]:
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target", ground_truth)
    if hasattr(ground_truth, "tolist"):
        ground_truth = ground_truth.tolist()  # Lists of a Parquet file arrive as arrays.
    return ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
