"""`actor_rollout_ref.rollout.{multi_turn,agent}.*`: conversations with tools or simulated users."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.base import Section
from dovetail.config.home import HomePath


class MultiTurnConfig(Section):
    """Several turns per response."""

    enable: bool = Field(False, description="Let a response span several turns.")
    max_assistant_turns: int | None = Field(None, ge=1, description="Most turns of the model. Null: by length only.")
    max_user_turns: int | None = Field(None, ge=1, description="Most turns of tools or user. Null: by length only.")
    max_parallel_calls: int = Field(1, ge=1, description="Tool calls of one turn that run at the same time.")
    max_tool_response_length: int = Field(256, ge=1, description="Longest tool answer, in characters.")
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        "middle", description="Side at which a longer tool answer is cut."
    )
    tool_config_path: HomePath | None = Field(None, description="YAML file of the tools.")
    interaction_config_path: HomePath | None = Field(None, description="YAML file of the simulated user.")
    use_inference_chat_template: bool = Field(False, description="Render later turns as an inference server would.")
    format: str = Field("hermes", description="Tool-call format of the model (hermes, llama3_json, gpt-oss, ...).")
    num_repeat_rollouts: int | None = Field(None, ge=1, description="Rollouts of one first turn. Null: one.")


class AgentLoopConfig(Section):
    """Workers that drive conversations."""

    num_workers: int = Field(8, ge=1, description="Worker processes.")
    default_agent_loop: str = Field("single_turn_agent", description="Loop of rows that name none.")
    agent_loop_config_path: HomePath | None = Field(None, description="YAML file of a user's loops.")
