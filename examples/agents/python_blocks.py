"""Problems such as GSM8K's with Python: the code blocks of a response are run, and their output comes back.

Code models write fenced blocks by themselves, so no format of tool calls has to be learned. A response without a block
ends the trajectory; its last number is the answer.
"""

from __future__ import annotations

import re
from typing import Any

from dovetail.agents import Environment, Step, Task
from dovetail.agents.tools.python import PythonToolbox
from dovetail.rewards.rules.gsm8k import compute_score

_BLOCK = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL)
_PYTHON = PythonToolbox(timeout_s=2, memory_limit_mb=512, max_output=1000)


class PythonBlocks(Environment):
    """One problem: program, output, answer."""

    def reset(self, task: Task) -> None:
        self.truth = task.row["reward_model"]["ground_truth"]
        self.programs = 0

    async def step(self, action: str) -> Step:
        blocks = _BLOCK.findall(action)
        if not blocks:
            right = compute_score(action, self.truth, method="flexible")["acc"]
            return Step("", reward=right, done=True, info={"acc": right, "programs": self.programs})
        self.programs += 1
        output = await _PYTHON.run("\n".join(blocks))
        return Step(f"```output\n{output or '(nothing was printed)'}\n```\nAnswer with the number.")

    def state(self) -> Any:
        return [self.truth, self.programs]

    def restore(self, state: Any) -> None:
        self.truth, self.programs = state
