"""What ends a trajectory, and under which name: deadlines in virtual time, faults of each kind, limits of turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.agents.calls import CallSettings, CheckedTools
from dovetail.agents.environments import Environment, Environments, Step
from dovetail.agents.loops import agent_loop, get_loop, load_loops, replays, tool_agent
from dovetail.agents.runner import Deadline, run_trajectory
from dovetail.agents.session import Session
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.types import InfrastructureError, Message, Task, ToolCall, ToolResult, Trajectory
from dovetail.config.user_code import UserCodeError
from tests.agents.fakes import FakeEngine, in_virtual_time, session_over
from tests.docs.blocks import blocks_of

pytestmark = pytest.mark.unit

TASK = Task([{"role": "user", "content": "go"}])


class ScriptedTools:
    """`!look x` calls `behaviour(x)`; counts the calls; its state is the count."""

    schemas: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]  # noqa: RUF012

    def __init__(self, behaviour: Callable[[str], Any], *, score: float | None = None, restores: bool = True) -> None:
        self.behaviour = behaviour
        self.score = score
        self.restores = restores
        self.num_calls = 0
        self.num_opened = 0
        self.num_closed = 0
        self.most_at_once = self.at_once = 0

    async def open(self, task: Task, state: Any = None) -> tuple[ScriptedTools, list[Message]]:
        self.num_opened += 1
        self.num_calls = state or 0
        return self, []

    async def call(self, call: ToolCall) -> ToolResult:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            result = self.behaviour((call.arguments or {})["x"])
            result = await result if asyncio.iscoroutine(result) else result
        finally:
            self.at_once -= 1
        self.num_calls += 1
        return result if isinstance(result, ToolResult) else ToolResult(result)

    async def reward(self) -> float | None:
        return self.score

    def state(self) -> Any:
        return self.num_calls if self.restores else None

    async def close(self) -> None:
        self.num_closed += 1


class Guessing(ScriptedTools):
    """An environment: the user says higher or lower, until the number is there."""

    def __init__(self, number: int) -> None:
        super().__init__(str, score=None)
        self.number = number

    async def respond(self, messages: list[Message]) -> ToolResult | None:
        guess = int(messages[-1]["content"])
        if guess == self.number:
            return ToolResult("right", reward=1.0, done=True)
        return ToolResult("higher" if guess < self.number else "lower", reward=-0.1)


async def trajectory(
    session: Session,
    toolbox: Any,
    loop: Any = tool_agent,
    *,
    seconds: float = 1800.0,
    state: Any = None,
    **settings: Any,
) -> Trajectory:
    return await run_trajectory(
        TASK, loop, session, toolbox, CallSettings(**settings), Deadline(seconds), tools_state=state
    )


def run(*answers: str, tools: Any = None, seconds: float = 1800.0, **settings: Any) -> tuple[Trajectory, float]:
    limits = {"max_turns": settings.pop("max_turns", None)}
    session = session_over(FakeEngine(*answers), response_length=500, **limits)
    return in_virtual_time(trajectory(session, tools or FunctionToolbox([]), seconds=seconds, **settings))


def test_calls_run_until_a_turn_has_none() -> None:
    tools = ScriptedTools(lambda x: ToolResult(x.upper(), reward=0.25), score=1.0)
    result, _ = run("!look a", "!look b; !look c", "done", tools=tools)
    assert (result.outcome, result.reward, tools.num_calls, tools.num_closed) == ("finished", 1.0, 3, 1)
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["A", "B", "C"]
    assert [reward for _, reward in result.segments[0].turn_rewards] == [0.25, 0.5]
    assert result.num_turns == 3
    assert [event["kind"] for event in result.events].count("tool") == 3


def test_an_environment_answers_turns_without_calls_until_it_is_done() -> None:
    result, _ = run("5", "9", "7", "never asked", tools=Guessing(7))
    assert result.outcome == "finished"
    assert [message["content"] for message in result.messages] == ["go", "5", "higher", "9", "lower", "7"]
    assert [reward for _, reward in result.segments[0].turn_rewards] == pytest.approx([-0.1, -0.1, 1.0])


def test_the_debate_of_the_page_trains_the_policys_turns_and_reads_the_opponents() -> None:
    """Two policies and two parts of one of them in an episode."""
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    [block] = [block for block in blocks_of(page) if '@agent_loop("debate")' in block.text]
    names: dict[str, Any] = {"__name__": "page"}
    exec(block.text, names)
    task = Task([{"role": "user", "content": "2+2?"}], {"reward_model": {"ground_truth": "4"}})
    session = session_over(FakeEngine("5", "It is 4", "no"))
    run = run_trajectory(task, names["debate"], session, FunctionToolbox([]), CallSettings(), Deadline(60.0))
    result, _ = in_virtual_time(run)
    assert (result.outcome, result.reward, len(result.segments)) == ("finished", 1.0, 2)
    said = [
        "".join(chr(token) for token, sampled in zip(row.token_ids, row.sampled, strict=True) if sampled == wanted)
        for wanted in (True, False)
        for row in (segment.response for segment in result.segments)
    ]
    solver, judge, read, _ = said
    assert ("5" in solver, "It is 4" in solver, "no" in judge) == (True, True, True)
    assert "Are you sure?" in read
    assert "sure" not in solver
    assert [reward for segment in result.segments for _, reward in segment.turn_rewards] == [0.0]


@pytest.mark.parametrize(
    ("settings", "turns", "calls"),
    [({"max_turns": 2}, 2, 2), ({"max_user_turns": 2}, 3, 2), ({"max_user_turns": 9}, 4, 3)],
)
def test_limits_of_turns_are_named(settings: dict[str, Any], turns: int, calls: int) -> None:
    tools = ScriptedTools(str, score=0.5)
    result, _ = run("!look a", "!look b", "!look c", "done", tools=tools, **settings)
    assert (len(result.messages), tools.num_calls) == (2 * turns, calls)
    assert result.outcome == ("finished" if turns == 4 else "max_turns")
    assert result.reward == 0.5


def test_the_policys_mistakes_are_observations() -> None:
    def raises(x: str) -> str:
        raise KeyError(x)

    result, _ = run("!look bad", "!look a", "done", tools=ScriptedTools(raises))
    texts = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert texts == ["Error: the call could not be read: no value.", "Error: look failed: KeyError: 'a'"]
    assert result.outcome == "finished"
    assert [event["failure"] for event in result.events if event["kind"] == "tool"] == ["invalid call", "exception"]


def test_a_tool_that_hangs_is_an_observation_at_its_deadline() -> None:
    async def hangs(x: str) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10_000)
        await asyncio.sleep(10_000)  # is cancelled, and does not end
        return x

    result, seconds = run("!look a", "done", tools=ScriptedTools(hangs), tool_timeout_s=60.0)
    assert result.outcome == "finished"
    assert result.messages[-2]["content"] == "Error: look timed out after 60 s."
    assert seconds >= 60


def test_infrastructure_is_tried_again_and_then_named() -> None:
    failures = ["first", "second"]

    def flaky(x: str) -> str:
        if failures:
            raise InfrastructureError(failures.pop())
        return x

    tools = ScriptedTools(flaky)
    result, _ = run("!look a", "done", tools=tools)
    assert (result.outcome, [event["kind"] for event in result.events].count("retry")) == ("finished", 2)

    def broken(x: str) -> str:
        raise InfrastructureError("no sandbox")

    tools = ScriptedTools(broken, score=0.0)
    result, _ = run("!look a", "never asked", tools=tools)
    assert (result.outcome, result.reward, tools.num_closed) == ("infra", None, 1)
    assert result.error == "look: no sandbox (3 attempts)"
    assert sum(result.segments[0].response.sampled) == len("!look a") + 1


@pytest.mark.parametrize("where", ["open", "reward"])
def test_what_fails_around_tools_is_not_scored(where: str) -> None:
    class Failing(ScriptedTools):
        async def fail(self, *_: Any) -> Any:
            raise InfrastructureError("not there")

    tools = Failing(str, score=1.0)
    setattr(tools, where, tools.fail)
    result, _ = run("done", tools=tools)
    assert (result.outcome, result.reward) == ("infra", None)


def test_the_trajectorys_deadline_is_graded_as_it_is() -> None:
    async def slow(x: str) -> str:
        await asyncio.sleep(50)
        return x

    tools = ScriptedTools(slow, score=0.75)
    result, seconds = run("!look a", "!look b", "!look c", "done", tools=tools, seconds=120.0)
    assert (result.outcome, result.reward, tools.num_calls) == ("time_limit", 0.75, 2)
    assert seconds == pytest.approx(120.0)


@pytest.mark.parametrize(("slow", "ends"), [("step", ("time_limit", [0.5])), ("reset", ("infra", []))])
def test_a_slow_step_of_an_environment_is_graded_as_it_is_and_a_slow_reset_is_not(slow: str, ends: Any) -> None:
    class World(Environment):
        num_steps = 0

        async def reset(self, task: Task) -> None:
            await asyncio.sleep(1000 if slow == "reset" else 0)

        async def step(self, action: str) -> Step:
            self.num_steps += 1
            await asyncio.sleep(1000 if self.num_steps == 2 else 0)
            return Step("go on", reward=0.5)

    result, _ = run("one", "two", "three", tools=Environments(World), seconds=600.0, tool_timeout_s=60.0)
    rewards = [reward for segment in result.segments for _, reward in segment.turn_rewards]
    assert (result.outcome, rewards) == ends


def test_time_in_which_the_engine_is_held_does_not_count() -> None:
    async def held() -> tuple[Trajectory, float]:
        deadline = Deadline(10.0)
        session = session_over(FakeEngine("done", seconds=8.0))
        task = asyncio.ensure_future(
            run_trajectory(TASK, tool_agent, session, FunctionToolbox([]), CallSettings(), deadline)
        )
        await asyncio.sleep(4)
        deadline.hold()
        await asyncio.sleep(1)
        deadline.go()
        return await task, asyncio.get_running_loop().time()

    (result, _), _ = in_virtual_time(held())
    assert result.outcome == "finished"


def test_a_turn_at_the_deadline_keeps_its_tokens() -> None:
    session = session_over(FakeEngine("hello", seconds=100.0))
    result, _ = in_virtual_time(trajectory(session, FunctionToolbox([]), seconds=5.0))
    assert result.outcome == "time_limit"
    assert result.segments[0].response.token_ids == (ord("h"),)


def test_no_room_is_named_length() -> None:
    session = session_over(FakeEngine("0123456789"), response_length=4)
    result, _ = in_virtual_time(trajectory(session, FunctionToolbox([])))
    assert (result.outcome, len(result.segments[0].response.token_ids)) == ("length", 4)


def test_calls_of_a_turn_run_in_order_so_many_at_a_time() -> None:
    async def slow(x: str) -> str:
        await asyncio.sleep(3.0 / int(x))
        return x

    tools = ScriptedTools(slow)
    result, _ = run("!look 1; !look 2; !look 3; !look 4", "done", tools=tools, max_parallel_calls=2)
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == list("1234")
    assert tools.most_at_once == 2


def test_one_of_many_trajectories_raises_and_the_others_finish() -> None:

    async def loop(task: Task, session: Session) -> float | None:
        if session.name == "13":
            raise RuntimeError("a bug of the loop")
        return await tool_agent(task, session)

    async def slow(x: str) -> str:
        await asyncio.sleep(3000)
        return x

    async def all_of_them() -> list[Trajectory]:
        sessions = [session_over(FakeEngine("!look a", "ok"), name=str(number)) for number in range(200)]
        return await asyncio.gather(
            *(
                trajectory(session, ScriptedTools(slow), loop, seconds=7200.0, tool_timeout_s=3600.0)
                for session in sessions
            )
        )

    results, seconds = in_virtual_time(all_of_them())
    assert [result.outcome for result in results].count("finished") == 199
    assert (results[13].outcome, results[13].error) == ("tool_error", "RuntimeError: a bug of the loop")
    assert seconds == pytest.approx(3000.0)


def test_a_resumed_trajectory_runs_no_call_again() -> None:
    async def slow(x: str) -> str:
        await asyncio.sleep(10)
        return x.upper()

    tools = ScriptedTools(slow, score=1.0)
    session = session_over(FakeEngine("!look a", "!look b", "done"), response_length=500)

    async def interrupted() -> tuple[Any, Any]:
        task = asyncio.ensure_future(trajectory(session, tools))
        await asyncio.sleep(15)  # in the second call
        state = session.state({}), session.tools.state()
        task.cancel()
        return state

    (turns, calls), _ = in_virtual_time(interrupted())
    turns, calls = json.loads(json.dumps([turns, calls]))
    again = ScriptedTools(slow, score=1.0)
    resumed = session_over(FakeEngine("done"), response_length=500, state=turns)
    result, _ = in_virtual_time(trajectory(resumed, again, state=calls))
    straight, _ = run("!look a", "!look b", "done", tools=ScriptedTools(slow, score=1.0))
    assert result.segments == straight.segments
    assert result.messages == straight.messages
    assert again.num_calls == 2  # one that was restored, one that ran
    assert [event["result"] for event in result.events if event["kind"] == "tool"] == ["A", "B"]


def test_a_record_is_json_and_as_it_was_before_the_call_that_runs() -> None:
    """Also where the state is the object that the call changes, and where numbers are numpy's."""
    seen: list[str] = []

    async def look(x: str) -> ToolResult:
        seen.append(x)
        await asyncio.sleep(10)
        return ToolResult("half \udcff", np.float32(0.5), metrics={"seen": np.float32(1.0)})

    class Seeing(ScriptedTools):
        def state(self) -> Any:
            return seen

    async def interrupted() -> Any:
        session = session_over(FakeEngine("!look a", "!look b"), response_length=500)
        task = asyncio.ensure_future(trajectory(session, Seeing(look)))
        await asyncio.sleep(15)  # in the second call
        task.cancel()
        return session.tools.state()

    state = json.loads(json.dumps(in_virtual_time(interrupted())[0]))
    assert (seen, state["tools"]) == (["a", "b"], ["a"])
    result = {"text": "half ?", "reward": 0.5, "done": False, "metrics": {"seen": 1.0}, "failure": ""}
    assert state["results"] == {"0": result}


def test_tools_that_cannot_be_restored_say_so_once_they_were_called() -> None:
    async def slow(x: str) -> str:
        await asyncio.sleep(10)
        return x

    async def states() -> list[Any]:
        session = session_over(FakeEngine("!look a", "!look b", "done"))
        task = asyncio.ensure_future(trajectory(session, ScriptedTools(slow, restores=False)))
        await asyncio.sleep(5)
        first = session.tools.state()
        await asyncio.sleep(10)
        second = session.tools.state()
        task.cancel()
        return [first, second]

    (first, second), _ = in_virtual_time(states())
    assert first == {"tools": None, "opening": [], "results": {}}
    assert second is None


def test_a_users_loop_by_name_and_by_file(tmp_path: Any) -> None:
    @agent_loop("test_two_turns")
    async def two_turns(task: Task, session: Session) -> float:
        first = await session.chat(task.messages)
        second = await session.chat([*task.messages, first.message, {"role": "user", "content": "sure?"}])
        return float(second.text == "yes")

    session = session_over(FakeEngine("no", "yes"))
    result, _ = in_virtual_time(trajectory(session, FunctionToolbox([]), get_loop("test_two_turns")))
    assert (result.outcome, result.reward) == ("finished", 1.0)
    assert replays("tool_agent")
    assert not replays("test_two_turns")
    (tmp_path / "loops.py").write_text(
        "class Fixed:\n"
        "    def __init__(self, score):\n"
        "        self.score = score\n"
        "    async def run(self, task, session):\n"
        "        await session.chat(task.messages)\n"
        "        return self.score\n"
    )
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: test_fixed, _target_: '{tmp_path}/loops.py:Fixed', score: 0.25}}\n"
    )
    load_loops(str(tmp_path / "loops.yaml"))
    result, _ = in_virtual_time(trajectory(session_over(FakeEngine("no")), FunctionToolbox([]), get_loop("test_fixed")))
    assert result.reward == 0.25
    with pytest.raises(ValueError, match="there is no agent loop 'nobody'"):
        get_loop("nobody")
    (tmp_path / "bad.yaml").write_text("- {name: x}\n")
    with pytest.raises(UserCodeError, match="_target_"):
        load_loops(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("prompt", "opening", "expected"),
    [
        ([("user", "go")], [("user", "Room 1.")], [("user", "go\n\nRoom 1.")]),
        ([("user", "go")], [("user", "a"), ("assistant", "b")], [("user", "go\n\na"), ("assistant", "b")]),
        ([("system", "s")], [("user", "a")], [("system", "s"), ("user", "a")]),
        ([], [("user", "a")], [("user", "a")]),
        ([("user", "go")], [], [("user", "go")]),
    ],
)
def test_the_first_observation_joins_a_prompt_that_ends_with_the_user(
    prompt: list[tuple[str, str]], opening: list[tuple[str, str]], expected: list[tuple[str, str]]
) -> None:
    def messages(pairs: list[tuple[str, str]]) -> list[Message]:
        return [{"role": role, "content": text} for role, text in pairs]

    given = messages(prompt)
    tools = CheckedTools(ScriptedTools(str), messages(opening), session_over(FakeEngine()), CallSettings())
    assert tools.after(given) == messages(expected)
    assert given == messages(prompt)
