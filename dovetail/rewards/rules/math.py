"""Mathematics: the last `\\boxed{}` (or the `Answer:` line) against the truth, by math-verify when it is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import time
from typing import Any

from dovetail.rewards.rules.extract import last_boxed
from dovetail.rewards.rules.latex import same_answer

_ANSWER_LINE = re.compile(r"(?im)^\W*(?:final\s+)?answer\s*(?:is)?\s*:\s*(.+?)\s*$")
# Long derivations end with their result, and math-verify reads every formula it is given.
_TAIL = 1000
_VERIFY_SECONDS = 10


def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    correct: float = 1.0,
    wrong: float = 0.0,
    use_math_verify: bool | None = None,
) -> dict[str, Any]:
    """`correct` or `wrong`. `use_math_verify=None` takes it when it is installed; True insists."""
    truth = last_boxed(str(ground_truth)) or str(ground_truth)
    answer = extract_answer(solution_str)
    if answer is None:
        return {"score": wrong, "acc": 0.0, "pred": ""}
    verify = has_math_verify() if use_math_verify is None else use_math_verify
    right = same_answer(answer, truth) or (verify and _verified(answer, truth))
    return {"score": correct if right else wrong, "acc": float(right), "pred": answer}


def extract_answer(solution_str: str) -> str | None:
    """What the solution says its result is."""
    tail = solution_str[-_TAIL:]
    boxed = last_boxed(tail)
    if boxed is not None:
        return boxed
    lines = _ANSWER_LINE.findall(tail)
    return lines[-1].strip().strip("$*").strip() if lines else None


@functools.cache
def has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _verified(answer: str, truth: str) -> bool:
    try:
        library = importlib.import_module("math_verify")
    except ImportError:
        raise ImportError("use_math_verify=True needs the package math-verify; pip install math-verify.") from None
    start = time.monotonic()
    gold = library.parse(f"\\boxed{{{truth}}}", parsing_timeout=_VERIFY_SECONDS)
    given = library.parse(f"\\boxed{{{answer}}}", parsing_timeout=_VERIFY_SECONDS)
    # Gold first: verify is not symmetric, it lets the answer be the more precise of the two.
    right = bool(library.verify(gold, given, timeout_seconds=_VERIFY_SECONDS))
    # It says "different" when it runs out of time. That is no verdict on the answer.
    if not right and time.monotonic() - start >= _VERIFY_SECONDS:
        raise TimeoutError(f"math-verify did not decide within {_VERIFY_SECONDS} s whether {answer!r} is {truth!r}.")
    return right
