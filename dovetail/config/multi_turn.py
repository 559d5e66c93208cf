"""`actor_rollout_ref.rollout.{multi_turn,agent}.*`: conversations with tools, environments or simulated users."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.config.base import HomePath, Section, key, unused, when_is


class MultiTurnConfig(Section):
    """Several turns per response."""

    rules = (
        unused(
            "a response is one turn: set multi_turn.enable=True, or give an agent loop or an environment",
            when_is("uses_agents", False),
            but="enable tool_config_path",
        ),
        unused("turns are appended to the ids there are, or begin a row", only="use_inference_chat_template"),
        unused("each trajectory has a first turn of its own", only="num_repeat_rollouts"),
    )

    enable: bool = key(False, "Let a response span several turns.")
    max_assistant_turns: int | None = key(None, "Most turns of the model. Null: by length only.", was="max_turns", ge=1)
    max_user_turns: int | None = key(None, "Most turns of tools or user. Null: by length only.", ge=1)
    max_parallel_calls: int = key(1, "Tool calls of one turn that run at the same time; all of them run.", ge=1)
    max_tool_response_length: int = key(256, "Longest tool response, in characters.", ge=1)
    max_tool_response_tokens: int | None = key(None, "Longest tool response, in tokens. Null: no limit.", ge=1)
    tool_response_truncate_side: Literal["left", "middle", "right"] = key("middle", "Where a longer one is cut.")
    tool_config_path: HomePath | None = key(None, "YAML file of the tools.")
    function_tool_path: HomePath | None = key(None, "Python file of functions marked with `@tool`.")
    interaction_config_path: HomePath | None = key(None, "YAML file of the simulated user.")
    mcp_servers: dict[str, Any] = key({}, "MCP servers of tools by name: {url: ...} or {command: ..., args: [...]}.")
    tool_timeout_s: float = key(60.0, "A call that takes longer is an observation: it timed out.", gt=0)
    trajectory_timeout_s: float = key(
        1800.0, "A trajectory that takes longer ends, and is graded as it is. Time of training does not count.", gt=0
    )
    infra_attempts: int = key(3, "Attempts before what fails around a tool ends its trajectory, unscored.", ge=1)
    on_rewrite: Literal["branch", "error"] = key("branch", "Where a template rewrites history: another row, or stop.")
    use_inference_chat_template: bool = key(False, "Render later turns as an inference server would.")
    format: str = key("hermes", "How the model writes calls: hermes, llama3_json, glm, ... (docs/agents.md).")
    num_repeat_rollouts: int | None = key(None, "Rollouts of one first turn. Null: one.", ge=1)


class AgentLoopConfig(Section):
    """Who drives conversations."""

    rules = (unused("conversations are driven beside the engine", only="num_workers"),)

    num_workers: int = key(0, "Worker processes; 0: beside the engine.", ge=0)
    default_agent_loop: str = key(
        "single_turn_agent", "Loop of rows that name none (`agent_name`); with tools or an environment, tool_agent."
    )
    agent_loop_config_path: HomePath | None = key(None, "YAML file of a user's loops.")
    command: str | None = key(
        None,
        "A program that drives each conversation over an endpoint like OpenAI's (OPENAI_BASE_URL, OPENAI_API_KEY and "
        "DOVETAIL_TASK are in its environment).",
    )
    environment: str | None = key(
        None,
        "A user's class, as package.module.Name or /path/to/file.py:Name: an `Environment`, or one whose public "
        "methods are tools.",
    )
