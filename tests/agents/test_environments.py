"""Classes whose methods are tools, environments whose actions are text, and several of them as one toolbox."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dovetail.agents import Environment, InfrastructureError, Step, Task, ToolResult, tool
from dovetail.agents.deadlines import DeadlineError, within
from dovetail.agents.environments import Environments
from dovetail.agents.tools.classes import ClassToolbox
from dovetail.agents.tools.combine import combine
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import Toolbox, ToolCall
from tests.agents.fakes import in_virtual_time

pytestmark = pytest.mark.unit


class Counter:
    """TRL's contract, with state."""

    def reset(self, ground_truth: int, *, level: str, start: int = 0) -> str:
        self.total, self.wanted = start, ground_truth
        return f"Count to {ground_truth}, {level}."

    def add(self, number: int) -> int:
        """Add to the counter.

        Args:
            number: What to add.
        """
        total = self.total
        self.total = total + number
        return self.total

    async def finish(self) -> ToolResult:
        """End."""
        return ToolResult("bye", reward=0.5, done=True)

    def get_reward(self) -> float:
        return float(self.total == self.wanted)

    def state(self) -> int:
        return self.total

    def restore(self, state: int) -> None:
        self.total = state

    def _hidden(self) -> None: ...


ROW = {"reward_model": {"ground_truth": 7}, "extra_info": {"level": "easy"}, "data_source": "count"}
TASK = Task([{"role": "user", "content": "Count."}], ROW, seed=3)


async def test_public_methods_are_tools_and_each_trajectory_has_an_instance() -> None:
    toolbox: Toolbox = ClassToolbox(Counter)
    (first, messages), (second, _) = [await toolbox.open(TASK) for _ in range(2)]
    assert messages == [{"role": "user", "content": "Count to 7, easy."}]
    assert [schema["function"]["name"] for schema in first.schemas] == ["add", "finish"]
    assert (await first.call(ToolCall("add", {"number": 4}))).text == "4"
    assert (await second.call(ToolCall("add", {"number": 1}))).text == "1"
    assert (await first.call(ToolCall("add", {"number": 3}))).text == "7"
    assert await first.call(ToolCall("finish", {})) == ToolResult("bye", reward=0.5, done=True)
    assert (await first.call(ToolCall("reset", {}))).text.startswith("Error: there is no tool 'reset'")
    assert (await first.reward(), await second.reward()) == (1.0, 0.0)
    again, _ = await toolbox.open(TASK, first.state())
    assert (await again.call(ToolCall("add", {"number": 1}))).text == "8"
    await first.close()


async def test_a_static_method_is_a_tool_with_all_its_arguments() -> None:
    class Sums:
        @staticmethod
        def add(first: int, second: int) -> int:
            """Add."""
            return first + second

    tools, _ = await ClassToolbox(Sums).open(TASK)
    assert (await tools.call(ToolCall("add", {"first": 2, "second": 3}))).text == "5"


async def test_methods_of_one_instance_never_run_side_by_side() -> None:
    tools, _ = await ClassToolbox(Counter).open(TASK)
    await asyncio.gather(*[tools.call(ToolCall("add", {"number": 1})) for _ in range(50)])
    assert (await tools.call(ToolCall("add", {"number": 0}))).text == "50"


def test_a_method_that_waits_for_another_loses_no_time_of_its_own() -> None:
    class Slow:
        async def work(self) -> None:
            """Work."""
            await asyncio.sleep(40)

        async def say(self) -> str:
            """Say."""
            return "said"

    async def play() -> str:
        tools, _ = await ClassToolbox(Slow).open(TASK)
        working = asyncio.ensure_future(tools.call(ToolCall("work", {})))
        said = await within(10, tools.call(ToolCall("say", {})))
        await working
        return said.text

    assert in_virtual_time(play()) == ("said", 40.0)


def test_reset_that_asks_for_a_missing_column_names_those_there_are() -> None:
    task = Task([], {"level": "hard", "data_source": "count"})
    with pytest.raises(ToolError, match=r"asks for ground_truth, .* has data_source, level, prompt, seed"):
        asyncio.run(ClassToolbox(Counter).open(task))


async def test_reset_with_keywords_gets_the_whole_row() -> None:
    class Echo:
        def reset(self, **row: Any) -> None:
            self.row = row

        def look(self) -> list[str]:
            """Look."""
            return sorted(self.row)

    names = '["data_source", "extra_info", "ground_truth", "level", "prompt", "reward_model", "seed"]'
    tools, messages = await ClassToolbox(Echo).open(TASK)
    assert messages == []
    assert tools.state() is None  # no restore
    assert await tools.reward() is None
    assert (await tools.call(ToolCall("look", {}))).text == names


def test_a_class_without_tools_is_refused() -> None:
    class Empty:
        def reset(self) -> None: ...

    with pytest.raises(ToolError, match="Empty has no tools"):
        ClassToolbox(Empty)


class Guess(Environment):
    def reset(self, task: Task) -> str:
        self.secret, self.asked = task.row["secret"], 0
        return "Guess a number."

    def step(self, action: str) -> Step:
        self.asked += 1
        guess = int(action)
        if guess == self.secret:
            return Step("Right.", reward=1.0, done=True, info={"asked": self.asked, "who": "you"})
        return Step("Higher." if guess < self.secret else "Lower.", reward=0.0)

    def state(self) -> int:
        return self.asked

    def restore(self, state: int) -> None:
        self.asked = state


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


@pytest.mark.parametrize("kind", [ClassToolbox, Environments])
async def test_an_instance_whose_constructor_outlasts_the_deadline_is_closed(kind: type[Toolbox]) -> None:
    may_end, closed = threading.Event(), asyncio.Event()

    class Slow:
        def __init__(self) -> None:
            may_end.wait(30)

        def look(self) -> None:
            """Look."""

        async def close(self) -> None:
            closed.set()

    toolbox: Any = kind(Slow)
    with pytest.raises(DeadlineError):
        await within(0.01, toolbox.open(TASK))
    may_end.set()
    await asyncio.wait_for(closed.wait(), 30)


async def test_an_environment_answers_the_models_text() -> None:
    toolbox: Any = Environments(Guess)
    game, messages = await toolbox.open(Task([], {"secret": 5}))
    assert messages == [{"role": "user", "content": "Guess a number."}]
    assert await game.reward() == 0.0  # cut off before the first step: no case for a reward function
    assert game.schemas == []
    assert "the tools are none" in (await game.call(ToolCall("guess", {}))).text
    assert await game.respond(say("3")) == ToolResult("Higher.", 0.0)
    again, _ = await toolbox.open(Task([], {"secret": 5}), game.state())
    assert await again.respond(say("5")) == ToolResult("Right.", 1.0, True, {"asked": 2.0})
    assert await again.reward() == 0.0  # the steps have scored it
    with pytest.raises(ValueError, match="invalid literal"):
        await game.respond(say("five"))
    await game.close()


@pytest.mark.parametrize(
    "value", [("so", 1, True, {"n": 1}), ("so", 1, False, True, {"n": 1}), Step("so", 1.0, True, {"n": 1})]
)
async def test_gyms_tuples_are_steps(value: Any) -> None:
    class Fixed(Environment):
        async def step(self, action: str) -> Any:
            return value

    class Unscored(Fixed):
        scores = False

    environment, messages = await Environments(Fixed).open(TASK)
    assert await (await Environments(Unscored).open(TASK))[0].reward() is None
    assert messages == []
    assert environment.state() is None
    assert await environment.respond(say("go")) == ToolResult("so", 1.0, True, {"n": 1.0})


def test_what_is_no_step_and_infrastructure_errors_reach_the_loop() -> None:
    class Broken(Environment):
        def step(self, action: str) -> Any:
            if action == "down":
                raise InfrastructureError("no server")
            return 3

    async def play(action: str) -> None:
        environment, _ = await Environments(Broken).open(TASK)
        await environment.respond(say(action))

    with pytest.raises(InfrastructureError):
        asyncio.run(play("down"))
    with pytest.raises(TypeError, match="step returned 3; return a Step"):
        asyncio.run(play("up"))


@tool
def double(x: int) -> int:
    """Double."""
    return 2 * x


class Memory:
    def __init__(self) -> None:
        self.kept = 0

    def reset(self) -> str:
        return "Remember."

    def keep(self, x: int) -> str:
        """Keep."""
        self.kept = x
        return "kept"

    def get_reward(self) -> float:
        return float(self.kept)

    def state(self) -> int:
        return self.kept

    def restore(self, state: int) -> None:
        self.kept = state


class Talk(Environment):
    def step(self, action: str) -> Step:
        return Step(action[::-1], reward=1.0)


async def test_calls_go_to_the_toolbox_that_has_the_tool() -> None:
    toolbox = combine([FunctionToolbox([double]), ClassToolbox(Memory)])
    tools, messages = await toolbox.open(Task([]))
    assert messages == [{"role": "user", "content": "Remember."}]
    assert not hasattr(tools, "respond")
    assert [schema["function"]["name"] for schema in tools.schemas] == ["double", "keep"]
    assert (await tools.call(ToolCall("double", {"x": 4}))).text == "8"
    assert (await tools.call(ToolCall("keep", {"x": 4}))).text == "kept"
    assert "the tools are double, keep" in (await tools.call(ToolCall("lose", {}))).text
    again, _ = await toolbox.open(Task([]), tools.state())
    assert (await tools.reward(), await again.reward()) == (4.0, 4.0)
    await tools.close()
    await toolbox.close()


async def test_an_environment_among_them_responds() -> None:
    tools: Any
    tools, _ = await combine([FunctionToolbox([double]), Environments(Talk)]).open(Task([]))
    assert (await tools.respond([{"role": "assistant", "content": "abc"}])).text == "cba"
    assert await tools.reward() == 0.0
    assert tools.state() is None


def test_two_tools_of_one_name_are_refused_and_what_was_opened_is_closed() -> None:
    closed = []

    class Closing(Memory):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ToolError, match="Two tools are called keep"):
        asyncio.run(combine([ClassToolbox(Closing), ClassToolbox(Closing)]).open(Task([])))
    assert len(closed) == 2
