"""verl's examples for GSM8K, named by its published configurations: a tool that checks answers, a patient user."""

from __future__ import annotations

import uuid
from typing import Any

from dovetail.agents.verl.bases import BaseInteraction, BaseTool, ToolResponse
from dovetail.rewards.rules import gsm8k


def score_of(text: str, ground_truth: Any) -> float:
    """1 for the right number, with or without the four signs before it."""
    marked = text if "#### " in text else f"#### {text}"
    return float(gsm8k.compute_score(marked, ground_truth, method="flexible")["score"])


class Gsm8kTool(BaseTool):
    """Tells the score of an answer. One that is no better than the last costs 0.05."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._instances: dict[str, tuple[Any, float]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid.uuid4())
        self._instances[instance_id] = (ground_truth, 0.0)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        truth, best = self._instances[instance_id]
        answer = str(parameters.get("answer", ""))
        score = score_of(answer, truth)
        self._instances[instance_id] = (truth, score)
        return ToolResponse(text=f"answer={answer!r} reward={score}"), 0.0 if score > best else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._instances[instance_id][1]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instances[instance_id]


class Gsm8kInteraction(BaseInteraction):
    """Asks again until the answer is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid.uuid4())
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        score = score_of(str(messages[-1].get("content") or ""), self._truths[instance_id])
        if score == 1.0:
            return True, "Your answer is correct.", score, {}
        return False, "Your answer is not correct. Think about it again, then answer once more.", score, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._truths.pop(instance_id or "", None)
