"""A calculator as an environment: the model writes `12*345=` and is told the result, or writes an answer.

The products are too hard for a small model's head, so it must learn to stop after `=` and to ask.
"""

from __future__ import annotations

from typing import Any

from dovetail.agents import Environment, Step, Task
from dovetail.agents.tools.calculator import calculator
from dovetail.demo.tasks import TaskSplit, generate_task
from dovetail.rewards.rules.arithmetic import compute_score

EXAMPLE = (
    ("system", "Use the calculator."),
    ("user", "12 * 345"),
    ("assistant", "12*345="),
    ("user", "4140"),
    ("assistant", "4140"),
)
"""A conversation before the model's own shows what can be written. Its product is no problem of the task."""
TWO_BY_TWO_DIGITS = 3
"""The level of the task `multiplication`."""


class Calculator(Environment):
    """One calculation, then the answer: reward 1 if the last number in it is the product."""

    def reset(self, task: Task) -> None:
        self.truth = task.row["reward_model"]["ground_truth"]
        self.num_calculated = 0

    def step(self, action: str) -> Step:
        expression, equals, rest = action.strip().partition("=")
        if equals and not rest and not self.num_calculated:
            self.num_calculated += 1
            try:
                return Step(calculator(expression))
            except (ValueError, ArithmeticError) as error:
                return Step(f"Error: {error}")
        reward = compute_score(action, self.truth)["score"]
        return Step(reward=reward, done=True, info={"calculations": self.num_calculated})

    def state(self) -> int:
        return self.num_calculated

    def restore(self, state: int) -> None:
        self.num_calculated = state


def generate_products(*, num_train: int, num_test: int, seed: int) -> TaskSplit:
    """Products of two numbers of two digits, behind the example."""
    split = generate_task(
        "multiplication", levels=[TWO_BY_TWO_DIGITS], num_train=num_train, num_test=num_test, seed=seed
    )
    return TaskSplit([_after_example(row) for row in split.train], [_after_example(row) for row in split.test])


def _after_example(row: dict[str, Any]) -> dict[str, Any]:
    product = row["prompt"][-1]["content"].removeprefix("What is ").partition("?")[0]
    return {**row, "prompt": [{"role": role, "content": text} for role, text in (*EXAMPLE, ("user", product))]}
