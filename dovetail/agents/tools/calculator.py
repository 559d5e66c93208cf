"""`calculator`: arithmetic without `eval`. Exact on fractions; what would take long is refused."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

from dovetail.agents.tools.functions import tool

Number: TypeAlias = Fraction | float

_MAX_LENGTH, _MAX_BITS, _MAX_DIGITS = 1000, 4096, 12
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "^": "**", "$": "", ",": ""})
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(math.floor(a / b)),
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: _power(a, b),
}
_FUNCTIONS: dict[str, Callable[[Number], Number]] = {
    "sqrt": lambda x: _power(x, Fraction(1, 2)),
    "abs": abs,
    "round": lambda x: Fraction(round(x)),
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


@tool
def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % **, parentheses, sqrt, abs, round, floor, ceil, exp, log, sin, cos, tan.
    """
    try:
        return format_number(evaluate(expression))
    except (ValueError, ArithmeticError) as error:
        return f"Error: {error}"


def evaluate(expression: str) -> Number:
    """The value. `ValueError` or `ArithmeticError` for what is no arithmetic, or too large."""
    text = expression.translate(_SIGNS).strip().removesuffix("=").strip()
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"the expression has more than {_MAX_LENGTH} characters")
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None


def format_number(value: Number) -> str:
    """Whole numbers as they are, others with at most 12 digits."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{_MAX_DIGITS}g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Fraction(str(value))  # exact as written: 0.1 + 0.2 is 0.3; no number for 1e999
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _limited(_BINARY[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _limited(_FUNCTIONS[name](_value(argument)))
    raise ValueError(
        f"{ast.unparse(node)!r} is no arithmetic; use numbers, + - * / // % ** and {', '.join(_FUNCTIONS)}"
    )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent.numerator) > _MAX_BITS:
            raise OverflowError("the result is too large")
        return base**exponent.numerator
    if base < 0:
        raise ValueError("the root of a negative number is not real")
    value = float(base) ** float(exponent)
    return Fraction(value) if value.is_integer() else value  # sqrt(16) is 4


def _limited(value: Number) -> Number:
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise OverflowError("the result is too large")
    return value
