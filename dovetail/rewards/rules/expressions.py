"""Read `2*sqrt(3)+x/2` into sympy without running it: sympy's own parser hands the text to Python's `eval`.

Knows numbers, single letters, `pi`, `sqrt`, `ln`, `+ - * / ^ !`, brackets and products without a sign. Refuses the
rest, and whatever would be large.
"""

from __future__ import annotations

import math
import re
from typing import Any

Expression = Any
"""A sympy expression. sympy's operators are made at run time, so a type checker does not see them."""

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(sqrt|ln|pi|[^\W\d_])|(\*\*|[-+*/^()!]))")
_LONGEST = 300
_LARGEST_POWER = 200


class NotAnExpression(ValueError):
    """The text is not arithmetic on numbers and letters, or too large to compute."""


def parse_expression(text: str) -> Expression:
    """The expression that the text says."""
    if len(text) > _LONGEST:
        raise NotAnExpression(f"{len(text)} characters; at most {_LONGEST} are read")
    parser = _Parser(_tokens(text))
    value = parser.sum()
    if parser.next is not None:
        raise NotAnExpression(f"{parser.next!r} is out of place in {text!r}")
    return value


def same_expression(left: str, right: str) -> bool:
    """Whether the difference simplifies to 0; False for what cannot be read."""
    import sympy

    try:
        difference = parse_expression(left) - parse_expression(right)
        return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)
    except (NotAnExpression, RecursionError, TypeError, ValueError, OverflowError):
        return False


def number_of(text: str) -> float | None:
    """The value of an expression without letters."""
    try:
        value = parse_expression(text)
        return float(value) if value.is_number and value.is_finite else None
    except (NotAnExpression, RecursionError, TypeError, ValueError, OverflowError):
        return None


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAnExpression(f"{text[position]!r} is not arithmetic")
        tokens.append("^" if match.group(3) == "**" else match.group().strip())
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens; a product needs no sign."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self, *wanted: str) -> str | None:
        token = self.next
        if token is None or token not in wanted:
            return None
        self._position += 1
        return token

    def sum(self) -> Expression:
        value = self._product()
        while sign := self._take("+", "-"):
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Expression:
        value = self._signed()
        while self.next is not None and self.next not in ("+", "-", ")"):
            divides = self._take("*", "/") == "/"
            factor = self._signed()
            value = value / factor if divides else value * factor
        return value

    def _signed(self) -> Expression:
        if sign := self._take("-", "+"):
            value = self._signed()
            return -value if sign == "-" else value
        return self._power()

    def _power(self) -> Expression:
        import sympy

        base = self._atom()
        while self._take("!"):
            if not (base.is_Integer and 0 <= base <= _LARGEST_POWER):
                raise NotAnExpression(f"the factorial of {base}")
            base = sympy.Integer(math.factorial(int(base)))
        if not self._take("^"):
            return base
        exponent = self._signed()
        if exponent.is_number and not abs(exponent) <= _LARGEST_POWER:
            raise NotAnExpression(f"the power {exponent}")
        return base**exponent

    def _atom(self) -> Expression:
        import sympy

        token = self.next
        self._position += 1
        if token == "(":
            value = self.sum()
            if not self._take(")"):
                raise NotAnExpression("a bracket stays open")
            return value
        if token is None or not (token[0].isalnum() or token[0] == "."):
            raise NotAnExpression(f"{token!r} is out of place")
        if token[0].isdigit() or token[0] == ".":
            return sympy.Float(token) if "." in token else sympy.Integer(token)
        if token in ("sqrt", "ln"):
            return (sympy.sqrt if token == "sqrt" else sympy.log)(self._atom())
        return sympy.pi if token == "pi" else sympy.Symbol(token)
