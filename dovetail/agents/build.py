"""From the configuration to what drives the conversations of a process: template, parser, tools, loops."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from dovetail.agents.calls import CallSettings
from dovetail.agents.chat import ChatRenderer, ChatTemplateError
from dovetail.agents.environments import Environment
from dovetail.agents.loops import agent_loop, find_object, load_loops
from dovetail.agents.parsers import find_parser, turn_parser
from dovetail.agents.session import SessionSettings
from dovetail.agents.stops import run_stop_ids
from dovetail.agents.stream import Agents
from dovetail.agents.template_audit import RESPONSE_CASE, RESULT_CASE, TemplateAudit
from dovetail.agents.tools.classes import ClassToolbox
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.tools.load import load_functions, load_toolbox
from dovetail.agents.tools.schema import ToolError
from dovetail.config.multi_turn import MultiTurnConfig
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import import_user_modules

logger = logging.getLogger(__name__)


def audit_template(config: DovetailConfig, tokenizer: Any) -> TemplateAudit:
    """What the chat template does with conversations, before a run.

    Raises `ChatTemplateError` where it refuses what the run's tools or its environment need: otherwise every trajectory
    would end as `tool_error`.
    """
    audit = _renderer(config, tokenizer).audit
    tools, responds = _kinds_of_tools(config) if audit.refused or not audit.shows_tools else (False, False)
    for case, is_needed in ((RESULT_CASE, tools), (RESPONSE_CASE, responds)):
        if is_needed and case in audit.refused:
            raise ChatTemplateError(
                f"the model's chat template does not take {case}, which the run needs: {audit.refused[case]}. Give one "
                "that does in actor_rollout_ref.model.custom_chat_template, or write the tools as an Environment, "
                "which speaks as the user. `dovetail doctor --agents` shows what a template takes."
            )
    for case, why in audit.refused.items():
        logger.warning("the chat template does not take %s: such a trajectory is a tool_error (%s)", case, why)
    if tools and not audit.shows_tools:
        logger.warning("the chat template shows no tools: the prompts must say which there are and how they are called")
    return audit


def refuse_broken_tools(config: DovetailConfig) -> None:
    """Fail here, instead of in every worker: the format of calls, the user's functions and classes. Starts no tool."""
    rollout = config.actor_rollout_ref.rollout
    find_parser(rollout.multi_turn.format)
    if rollout.agent.agent_loop_config_path is not None:
        load_loops(rollout.agent.agent_loop_config_path)
    if rollout.multi_turn.function_tool_path:
        load_functions(rollout.multi_turn.function_tool_path)
    if rollout.agent.environment is not None:
        found = find_object(rollout.agent.environment, key="agent.environment")
        if isinstance(found, type):
            _refuse_class(found, rollout.agent.environment)


def _refuse_class(cls: type, address: str) -> None:
    if not issubclass(cls, Environment):
        ClassToolbox(cls)
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ToolError(
            f"agent.environment={address} is made for each trajectory without arguments, but its __init__ needs some: "
            f"{error}. Give them defaults; what belongs to a row comes to reset."
        ) from None


def _kinds_of_tools(config: DovetailConfig) -> tuple[bool, bool]:
    """Whether the run has tools to call, and whether something responds in the user's place."""
    turns, environment = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.rollout.agent.environment
    found = None if environment is None else find_object(environment, key="agent.environment")
    plays = isinstance(found, type) and issubclass(found, Environment)
    tools = turns.tool_config_path or turns.function_tool_path or turns.mcp_servers or (found is not None and not plays)
    return bool(tools), plays or turns.interaction_config_path is not None


def _renderer(config: DovetailConfig, tokenizer: Any) -> ChatRenderer:
    if (template := config.actor_rollout_ref.model.custom_chat_template) is not None:
        tokenizer.chat_template = template
    return ChatRenderer(tokenizer, **config.data.apply_chat_template_kwargs)


def build_agents(config: DovetailConfig, tokenizer: Any) -> Agents:
    """Imports the user's code: call it where a run is about to start."""
    rollout = config.actor_rollout_ref.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    import_user_modules(config.trainer.import_modules)
    if agent.agent_loop_config_path is not None:
        load_loops(agent.agent_loop_config_path)
    renderer = _renderer(config, tokenizer)
    toolbox = load_toolbox(
        tool_config_path=turns.tool_config_path,
        function_tool_path=turns.function_tool_path,
        interaction_config_path=turns.interaction_config_path,
        environment=agent.environment,
        mcp_servers=turns.mcp_servers,
    )
    loop = agent.default_agent_loop
    if agent.command is not None:
        from dovetail.agents.endpoint import command_agent  # needs the extra `remote`

        loop = "command"
        agent_loop(loop)(command_agent(agent.command, idle_timeout_s=turns.trajectory_timeout_s))
    return Agents(
        SessionSettings(
            renderer,
            turn_parser(turns.format, tokenizer),
            rollout.prompt_length,
            rollout.response_length,
            max_turns=turns.max_assistant_turns,
            branches=turns.on_rewrite == "branch",
            text_stop_ids=run_stop_ids(config, tokenizer).text if rollout.stop_token_ids else frozenset(),
            config=config,
        ),
        CallSettings(
            tool_timeout_s=turns.tool_timeout_s,
            infra_attempts=turns.infra_attempts,
            max_parallel_calls=turns.max_parallel_calls,
            max_user_turns=turns.max_user_turns,
            max_tool_response_length=turns.max_tool_response_length,
            truncate_side=turns.tool_response_truncate_side,
            shorten=_shortener(turns, tokenizer),
        ),
        toolbox or FunctionToolbox([]),
        # A run with tools means to use them, also where no row says so.
        "tool_agent" if toolbox is not None and loop == "single_turn_agent" else loop,
        turns.trajectory_timeout_s,
        _stall_timeout_s(config),
    )


def _stall_timeout_s(config: DovetailConfig) -> float | None:
    """Without asynchronous training: the time that a trajectory may take, which nobody watches while one blocks."""
    settings = config.async_training
    if settings.mode == "off":
        return config.actor_rollout_ref.rollout.multi_turn.trajectory_timeout_s
    return settings.stall_timeout_s or None


def _shortener(turns: MultiTurnConfig, tokenizer: Any) -> Any:
    """Cuts a text to so many tokens, at the side that is asked for."""
    most, side = turns.max_tool_response_tokens, turns.tool_response_truncate_side
    if most is None:
        return None

    def shorten(text: str) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= most:
            return text
        first = {"left": 0, "middle": (most + 1) // 2, "right": most}[side]
        last = most - first
        end = tokenizer.decode(ids[len(ids) - last :]) if last else ""
        return f"{tokenizer.decode(ids[:first])}...(truncated)...{end}"

    return shorten
