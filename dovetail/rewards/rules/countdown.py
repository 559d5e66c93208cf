"""Countdown: an expression that uses each given number once and makes the target. Evaluates by itself, never `eval`."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dovetail.rewards.rules.extract import last_boxed

_TAG = re.compile(r"(?s)<answer>(.*?)</answer>")
_SIGNS = {"\u00d7": "*", "\u00f7": "/", "\u2212": "-", r"\times": "*", r"\div": "/"}
_EXPRESSION = re.compile(r"[\d(][\d\s+\-*/().]*")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def compute_score(
    solution_str: str, ground_truth: Any, *, score: float = 1.0, format_score: float = 0.0
) -> dict[str, Any]:
    """`score` for a solution, `format_score` for a readable expression that is none, else 0."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    expression = extract_expression(solution_str)
    parsed = None if expression is None else _parse(expression)
    if parsed is None:
        return {"score": 0.0, "acc": 0.0, "pred": expression or ""}
    value, used = parsed
    correct = value == Fraction(truth["target"]) and used == Counter(int(number) for number in truth["numbers"])
    return {"score": score if correct else format_score, "acc": float(correct), "pred": expression}


def extract_expression(solution_str: str) -> str | None:
    """The expression in the last `<answer>` tag or box, or the last one in the text; without `= target`."""
    tagged = _TAG.findall(solution_str)
    text = tagged[-1] if tagged else (last_boxed(solution_str) or solution_str)
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    pieces = [piece.strip() for piece in _EXPRESSION.findall(text)]
    with_operator = [piece for piece in pieces if re.search(r"\d\s*\)*\s*[+\-*/]", piece)]
    candidates = with_operator or pieces
    return candidates[-1].rstrip(" .+-*/") if candidates else None


def _parse(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """Value and numbers used; None for what is no arithmetic, or divides by zero."""
    if len(expression) > 200:
        return None
    used: Counter[int] = Counter()
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left, used), _evaluate(node.right, used))
    raise ValueError(f"{ast.dump(node)} is no arithmetic on whole numbers")
