"""Word problems in the manner of GSM8K, with a calculator: a class whose methods are tools, which scores itself."""

from __future__ import annotations

from typing import Any

from dovetail.agents import ToolResult
from dovetail.agents.tools.calculator import calculator


class WordProblem:
    """One problem. The model calculates as often as it likes, then answers once."""

    def reset(self, ground_truth: Any, **row: Any) -> str:
        self.truth, self.given, self.calls = float(str(ground_truth).replace(",", "")), None, 0
        return "Use `calculate` for every calculation, then call `answer` with the number."

    def calculate(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Numbers with + - * / and parentheses.
        """
        self.calls += 1
        return calculator(expression)

    def answer(self, number: float) -> ToolResult:
        """Give the final answer.

        Args:
            number: The answer to the problem.
        """
        self.given = number
        return ToolResult("", done=True, metrics={"calculations": float(self.calls)})

    def get_reward(self) -> float:
        if self.given is None:
            return 0.0
        return 1.0 if abs(self.given - self.truth) < 1e-6 else 0.1
