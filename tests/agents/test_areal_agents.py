"""Agents written for AReaL: a class with `async run(data, **kwargs)`, and rewards by the ids of completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from dovetail.agents.endpoint import black_box
from dovetail.agents.loops import as_loop, get_loop, load_loops
from dovetail.agents.session import Session
from dovetail.agents.types import Task, Trajectory
from tests.agents.test_endpoint import HELLO, ScriptedEngine, run_agent

pytestmark = pytest.mark.unit

AGENT = """
import openai

class Retries:
    def __init__(self, max_turns=2, **kwargs):
        self.max_turns = max_turns

    async def run(self, data, **extra_kwargs):
        assert extra_kwargs["http_client"] is None
        client = openai.AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"], max_retries=0)
        messages, rewards = list(data["messages"]), {}
        for _ in range(self.max_turns):
            whole = await client.chat.completions.create(model="default", messages=messages)
            message = whole.choices[0].message
            rewards[whole.id] = float(message.content == data["reward_model"]["ground_truth"])
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
        await client.close()
        return rewards
"""


def _turn_rewards(trajectory: Trajectory) -> list[list[tuple[int, float]]]:
    return [list(segment.turn_rewards) for segment in trajectory.segments]


def test_a_class_of_areal_in_a_file_of_loops_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: test_areal, _target_: '{tmp_path}/agent.py:Retries', max_turns: 3}}"
    )
    load_loops(str(tmp_path / "loops.yaml"))
    engine = ScriptedEngine("7", "41", "42")
    trajectory = run_agent(get_loop("test_areal"), engine)
    assert (trajectory.outcome, trajectory.reward, len(engine.requests)) == ("finished", 0.0, 3)
    [rewards] = _turn_rewards(trajectory)
    assert [reward for _, reward in rewards] == [0.0, 0.0, 1.0]
    assert rewards[-1][0] == len(trajectory.segments[0].response.token_ids) - 1


def test_a_class_without_kwargs_gets_what_it_names_and_returns_one_reward() -> None:
    class Brief:
        async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                whole = await client.chat.completions.create(model="default", messages=data["messages"])
            return float(whole.choices[0].message.content == "42")

    trajectory = run_agent(as_loop(Brief), ScriptedEngine("42"))
    assert (trajectory.outcome, trajectory.reward, _turn_rewards(trajectory)) == ("finished", 1.0, [[]])


def test_a_class_with_a_session_is_our_own_whatever_it_calls_the_task() -> None:
    class Own:
        async def run(self, data: Task, session: Session) -> float:
            return float((await session.chat(data.messages)).text == "42")

    assert run_agent(as_loop(Own), ScriptedEngine("42")).reward == 1.0


@pytest.mark.parametrize(
    ("given", "outcome", "reward"), [({}, "finished", None), ({"chatcmpl-1": 1.0}, "tool_error", None)]
)
def test_rewards_of_no_completion_are_not_guessed(given: dict[str, float], outcome: str, reward: None) -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> dict[str, float]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="default", messages=list(HELLO))  # type: ignore[arg-type]
        return given

    trajectory = run_agent(black_box(agent), ScriptedEngine("42"))
    assert (trajectory.outcome, trajectory.reward) == (outcome, reward)
    if given:
        assert "reward for chatcmpl-1, the id of no completion; there are: chatcmpl-" in trajectory.error
