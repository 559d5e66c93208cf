"""Sums, products, expressions and the countdown game."""

from __future__ import annotations

import random
from fractions import Fraction

from dovetail.data.tasks.problem import Problem, Task

_ONLY_NUMBER = "Answer with the number only."


def _addition(rng: random.Random, level: int) -> Problem:
    a, b = _digits(rng, level), _digits(rng, level)
    return Problem(f"What is {a} + {b}? {_ONLY_NUMBER}", str(a + b), tuple(sorted((a, b))))


def _multiplication(rng: random.Random, level: int) -> Problem:
    a, b = _digits(rng, (level + 2) // 2), _digits(rng, (level + 1) // 2)
    return Problem(f"What is {a} * {b}? {_ONLY_NUMBER}", str(a * b), tuple(sorted((a, b))))


def _expression(rng: random.Random, level: int) -> Problem:
    value = rng.randint(1, 9)
    text, is_sum = str(value), False
    for _ in range(level):
        sign, operand = rng.choice("+-*"), rng.randint(1, 9)
        if sign == "*" and is_sum:
            text = f"({text})"
        text, is_sum = f"{text} {sign} {operand}", sign != "*"
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
    return Problem(f"What is {text}? {_ONLY_NUMBER}", str(value), text)


def _countdown(rng: random.Random, level: int) -> Problem:
    """Numbers first, then a way to combine them all: every problem has a solution."""
    count, largest = min(level + 1, 6), 9 if level == 1 else 20 if level == 2 else 99
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        target = _combine(rng, [Fraction(number) for number in numbers])
        if target is not None and target.denominator == 1 and 1 <= target <= 999 and target not in numbers:
            break
    question = (
        f"Using the numbers {', '.join(map(str, numbers))}, each exactly once, and + - * / with parentheses, make "
        f"{target}. Write the expression between <answer> and </answer>."
    )
    truth = {"target": int(target), "numbers": numbers}
    return Problem(question, truth, (int(target), *sorted(numbers)))


def _combine(rng: random.Random, values: list[Fraction]) -> Fraction | None:
    while len(values) > 1:
        rng.shuffle(values)
        a, b = values.pop(), values.pop()
        sign = rng.choice("+-*/")
        if sign == "/" and b == 0:
            return None
        values.append({"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[sign])
    return values[0]


def _digits(rng: random.Random, count: int) -> int:
    return rng.randint(0 if count == 1 else 10 ** (count - 1), 10**count - 1)


_DIGITS = tuple(f"numbers of {n} digit{'s' * (n > 1)}" for n in range(1, 7))
_FACTORS = tuple(f"{(n + 2) // 2} by {(n + 1) // 2} digits" for n in range(1, 7))
TASKS = (
    Task("addition", "math", _addition, _DIGITS),
    Task("multiplication", "math", _multiplication, _FACTORS),
    Task("arithmetic", "math", _expression, tuple(f"{n + 1} numbers" for n in range(1, 7))),
    Task("countdown", "math", _countdown, tuple(f"{n + 1} numbers" for n in range(1, 6))),
)
