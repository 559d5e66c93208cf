"""`actor_rollout_ref.rollout.{multi_turn,agent}.*`: conversations with tools or simulated users."""

from __future__ import annotations

from typing import ClassVar, Literal

from dovetail.config.base import Rule, Section, key, unsupported, unused
from dovetail.config.home import HomePath


class MultiTurnConfig(Section):
    """Several turns per response."""

    rules: ClassVar[tuple[Rule, ...]] = (unused("a response is one turn", but="enable tool_config_path"),)

    enable: bool = key(
        False,
        "Let a response span several turns.",
        rules=unsupported("a response is one turn, and no tool is called; use False"),
    )
    max_assistant_turns: int | None = key(None, "Most turns of the model. Null: by length only.", ge=1)
    max_user_turns: int | None = key(None, "Most turns of tools or user. Null: by length only.", ge=1)
    max_parallel_calls: int = key(1, "Tool calls of one turn that run at the same time.", ge=1)
    max_tool_response_length: int = key(256, "Longest tool response, in characters.", ge=1)
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "Side at which a longer tool response is cut."
    )
    tool_config_path: HomePath | None = key(None, "YAML file of the tools.")
    interaction_config_path: HomePath | None = key(None, "YAML file of the simulated user.")
    use_inference_chat_template: bool = key(False, "Render later turns as an inference server would.")
    format: str = key("hermes", "Tool-call format of the model (hermes, llama3_json, gpt-oss, ...).")
    num_repeat_rollouts: int | None = key(None, "Rollouts of one first turn. Null: one.", ge=1)


class AgentLoopConfig(Section):
    """Workers that drive conversations."""

    rules: ClassVar[tuple[Rule, ...]] = (unused("a response is one turn"),)

    num_workers: int = key(8, "Worker processes.", ge=1)
    default_agent_loop: str = key("single_turn_agent", "Loop of rows that name none.")
    agent_loop_config_path: HomePath | None = key(None, "YAML file of a user's loops.")
