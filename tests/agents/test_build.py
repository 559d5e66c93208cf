"""What drives conversations, from the configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.agents.build import build_agents
from dovetail.agents.loops import get_loop
from dovetail.config import load_config
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import UserCodeError
from tests.models.tiny import tiny_tokenizer

pytestmark = pytest.mark.unit

R = "actor_rollout_ref.rollout"
TOOLS = '''
from dovetail.agents.tools.functions import tool


@tool
def look(x: int) -> str:
    """Look at a place.

    Args:
        x: Its number.
    """
    return str(x)
'''


def config_of(*overrides: str) -> DovetailConfig:
    return load_config(overrides=list(overrides)).config


def test_tools_without_a_named_loop_are_used(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    path = f"{R}.multi_turn.function_tool_path={tmp_path / 'tools.py'}"
    config = config_of(f"{R}.multi_turn.enable=True", path, f"{R}.multi_turn.max_assistant_turns=3")
    agents = build_agents(config, tiny_tokenizer())
    assert (agents.default_loop, agents.session.max_turns) == ("tool_agent", 3)
    named = config_of(f"{R}.agent.default_agent_loop=single_turn_agent", f"{R}.multi_turn.enable=True")
    assert build_agents(named, tiny_tokenizer()).default_loop == "single_turn_agent"


def test_an_environment_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = config_of(f"{R}.agent.environment={tmp_path / 'none.py'}:Env")
    with pytest.raises(UserCodeError, match="there is no file"):
        build_agents(config, tiny_tokenizer())


@pytest.mark.parametrize(
    ("side", "cut"),
    [("left", "...(truncated)...6789"), ("middle", "01...(truncated)...89"), ("right", "0123...(truncated)...")],
)
def test_results_of_tools_are_cut_to_their_tokens(side: str, cut: str) -> None:
    config = config_of(
        f"{R}.multi_turn.enable=True",
        f"{R}.multi_turn.max_tool_response_tokens=4",
        f"{R}.multi_turn.tool_response_truncate_side={side}",
    )
    shorten: Any = build_agents(config, tiny_tokenizer()).calls.shorten
    assert (shorten("0123456789"), shorten("0123")) == (cut, "0123")


@pytest.mark.parametrize(
    ("override", "uses"),
    [
        (f"{R}.multi_turn.enable=True", True),
        (f"{R}.agent.command=python agent.py", True),
        (f"{R}.agent.environment=a.B", True),
        (f"{R}.agent.default_agent_loop=tool_agent", True),
        (f"{R}.multi_turn.max_user_turns=3", False),
    ],
)
def test_what_makes_a_response_a_conversation(override: str, uses: bool) -> None:
    assert config_of(override).actor_rollout_ref.rollout.uses_agents == uses


def test_a_program_is_a_loop() -> None:
    pytest.importorskip("aiohttp")
    agents = build_agents(config_of(f"{R}.agent.command=python agent.py"), tiny_tokenizer())
    assert agents.default_loop == "command"
    assert callable(get_loop("command"))
