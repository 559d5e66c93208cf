"""Faults of real tools, through the loop: what the policy did is an observation, what is around it is never a score."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dovetail.agents import Environment, Step, Task, tool
from dovetail.agents.calls import CallSettings
from dovetail.agents.deadlines import DeadlineError, place_in, within
from dovetail.agents.environments import Environments
from dovetail.agents.loops import AgentLoop, tool_agent
from dovetail.agents.openenv import OpenEnv
from dovetail.agents.runner import Deadline, run_trajectory
from dovetail.agents.tools.classes import ClassToolbox
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.tools.python import PythonToolbox
from dovetail.agents.types import Toolbox, Trajectory
from tests.agents.fakes import FakeEngine, session_over

pytestmark = pytest.mark.unit

TASK = Task([{"role": "user", "content": "go"}])


def play(toolbox: Toolbox, *turns: str, loop: AgentLoop = tool_agent, **settings: Any) -> Trajectory:
    async def run() -> Trajectory:
        session = session_over(FakeEngine(*turns), response_length=2000)
        limits = CallSettings(infra_attempts=1, max_tool_response_length=1000, **settings)
        return await run_trajectory(TASK, loop, session, toolbox, limits, Deadline(600.0))

    return asyncio.run(run())


def failures(result: Trajectory) -> list[Any]:
    return [event.get("failure") for event in result.events if event["kind"] == "tool"]


@tool(name="python")
def strict(x: int) -> str:
    """Divide."""
    return str(6 // x)


def test_what_the_policy_did_is_an_observation_with_a_name() -> None:
    turns = ["!python two", "!ptyhon 2", "!python bad", "!python 0", "!python 2", "done"]
    result = play(FunctionToolbox([strict]), *turns)
    assert (result.outcome, result.error) == ("finished", "")
    assert failures(result) == ["invalid call", "invalid call", "invalid call", "exception", None]
    assert result.messages[-2]["content"] == "3"


def test_a_thread_that_hangs_is_an_observation_at_its_deadline() -> None:
    release = threading.Event()

    @tool
    def wait(x: str) -> None:
        """Wait."""
        release.wait()

    result = play(FunctionToolbox([wait]), "!wait 1", "done", tool_timeout_s=0.2)
    release.set()
    assert (result.outcome, failures(result)) == ("finished", ["timeout"])


def test_a_program_out_of_time_is_the_policys_and_a_sandbox_that_does_not_start_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toolbox = PythonToolbox(timeout_s=0.3)
    toolbox._functions = {"python": (strict_code(), lambda x: toolbox.run(x))}
    result = play(toolbox, "!python while True: pass", "done")
    assert result.outcome == "finished"
    assert result.messages[-2]["content"] == "Error: the program was ended after 0.3 s."

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr("dovetail.rewards.sandbox._launchers.launch", refuse)
    result = play(toolbox, "!python 1", "done")
    assert (result.outcome, result.reward, failures(result)) == ("infra", None, ["infra"])
    assert "no more processes" in result.error


def strict_code() -> Any:
    from dovetail.agents.tools.schema import read_signature

    def run(x: str) -> str:
        """Run."""
        return x

    return read_signature(run, name="python")


def test_an_environment_that_is_not_there_is_infrastructure_and_one_that_breaks_is_an_error() -> None:
    result = play(Environments(lambda: OpenEnv("http://127.0.0.1:1")), "hello")
    assert (result.outcome, result.reward) == ("infra", None)
    assert "the environment http://127.0.0.1:1 did not reset" in result.error

    class Broken(Environment):
        def step(self, action: str) -> Any:
            raise KeyError(action)

    result = play(Environments(Broken), "hello")
    assert (result.outcome, result.reward, result.error) == ("tool_error", None, "KeyError: 'hello'")


@pytest.mark.parametrize("value", [None, float("nan"), "good"])
def test_a_reward_that_is_no_number_is_an_error_and_not_left_to_the_reward_function(value: Any) -> None:
    class Note:
        def write(self, line: str) -> None:
            """Write."""

        def get_reward(self) -> Any:
            return value

    class Game(Environment):
        def step(self, action: str) -> Step:
            return Step("", reward=value, done=True)

        def get_reward(self) -> Any:
            return value

    async def loop(task: Task, session: Any) -> Any:
        await session.chat(task.messages)
        return value

    note, game = play(ClassToolbox(Note), "done"), play(Environments(Game), "done")
    assert (note.outcome, game.outcome) == ("tool_error", "tool_error")
    assert note.error == f"ValueError: the reward of Note.get_reward is {value!r}; it must be a finite number."
    whose = "Game.get_reward" if value is None else "a turn"
    assert f"the reward of {whose} is {value!r}; it must be a finite number." in game.error
    if value is not None:  # which leaves it to the reward function
        assert "the reward that the agent loop returned is" in play(FunctionToolbox([]), "done", loop=loop).error


def test_an_agent_that_never_asks_the_model_is_an_error_and_no_empty_response_to_score() -> None:
    async def loop(task: Task, session: Any) -> None: ...

    result = play(FunctionToolbox([]), loop=loop)
    assert (result.outcome, result.reward) == ("tool_error", None)
    assert "has not asked the model for a turn" in result.error


def test_what_breaks_every_trajectory_is_logged_once_from_the_users_code_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Environment):
        def step(self, action: str) -> Any:
            raise KeyError(action)

    class Unscored(Environment):
        def step(self, action: str) -> Step:
            return Step("", done=True)

        def get_reward(self) -> float:
            raise OSError("no judge")

    for action in ("hello", "again"):
        play(Environments(Broken), action)
        play(Environments(Unscored), action)
    first, second = [record.getMessage() for record in caplog.records]
    for message, words in ((first, "KeyError: 'hello'"), (second, "OSError: no judge")):
        assert message.endswith(words)
        assert message.count('  File "') == 1
        assert f'  File "{__file__}"' in message


def test_a_cancellation_that_nobody_asked_for_is_an_error_and_not_the_silent_end_of_a_trajectory() -> None:
    """Whoever waits for the group of a trajectory that vanished would wait for ever."""

    @tool
    async def cancelled(x: str) -> None:
        """Await what somebody else has cancelled."""
        raise asyncio.CancelledError

    result = play(FunctionToolbox([cancelled]), "!cancelled 1", "done")
    assert (result.outcome, failures(result)) == ("finished", ["exception"])

    async def loop(task: Task, session: Any) -> None:
        raise asyncio.CancelledError

    result = play(FunctionToolbox([]), loop=loop)
    assert (result.outcome, result.error) == ("tool_error", "RuntimeError: its own code cancelled it")


def test_the_deadline_of_a_call_stands_still_while_it_waits_for_its_turn() -> None:
    async def call(places: asyncio.Semaphore, *, forever: bool = False) -> str:
        async with place_in(places):
            return await asyncio.sleep(3600 if forever else 0, "ran")

    async def run() -> None:
        places = asyncio.Semaphore(0)
        asyncio.get_running_loop().call_later(0.6, places.release)
        assert await within(0.2, call(places)) == "ran"
        with pytest.raises(DeadlineError, match="longer than"):
            await within(0.2, call(places, forever=True))

    asyncio.run(run())
