"""What drives conversations, from the configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.agents.build import audit_template, build_agents
from dovetail.agents.chat import ChatTemplateError
from dovetail.agents.loops import get_loop
from dovetail.config import load_config
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import UserCodeError
from dovetail.data.files import needs_ground_truth
from tests.agents.tokenizers import family_tokenizer
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


def test_rows_of_a_program_or_an_environment_need_no_ground_truth() -> None:
    assert needs_ground_truth(config_of())
    assert not needs_ground_truth(config_of(f"{R}.agent.command=python agent.py"))
    assert not needs_ground_truth(config_of(f"{R}.agent.environment=games.py:Game"))


ENVIRONMENT = """
from dovetail.agents import Environment


class Game(Environment):
    pass


class Desk:
    def look(self, x: int) -> str:
        \"\"\"Look at a place.\"\"\"
        return str(x)
"""
NO_TOOL_ROLE = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant: "


@pytest.mark.parametrize("name", ["tools.py", "env.py:Desk"])
def test_a_template_that_refuses_results_of_tools_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    key = "agent.environment" if ":" in name else "multi_turn.function_tool_path"
    keys = [f"{R}.multi_turn.enable=True", f"{R}.{key}={tmp_path / name}"]
    with pytest.raises(ChatTemplateError, match=r"does not take a result after a call.*custom_chat_template"):
        audit_template(config_of(*keys), family_tokenizer("gemma"))
    with pytest.raises(ChatTemplateError, match="leaves out a message of role tool"):
        audit_template(
            config_of(*keys, f"actor_rollout_ref.model.custom_chat_template={NO_TOOL_ROLE!r}"), tiny_tokenizer()
        )
    assert audit_template(config_of(*keys), family_tokenizer("llama3")).to_dict()["append_only"] is False


def test_a_template_need_not_know_what_the_run_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    config = config_of(f"{R}.agent.environment={tmp_path / 'env.py'}:Game")
    assert "a result after a call" in audit_template(config, family_tokenizer("gemma")).refused


def test_conversations_are_written_in_the_template_of_the_configuration() -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}[assistant] "
    config = config_of(f"{R}.multi_turn.enable=True", f"actor_rollout_ref.model.custom_chat_template={template!r}")
    tokenizer = tiny_tokenizer()
    ids = build_agents(config, tokenizer).session.renderer.start([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "[user] hi</s>[assistant] "
