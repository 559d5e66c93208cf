"""Several toolboxes as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.agents import Environment, Step, Task, tool
from dovetail.agents.environments import Environments
from dovetail.agents.tools.classes import ClassToolbox
from dovetail.agents.tools.combine import combine
from dovetail.agents.tools.functions import FunctionToolbox
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import ToolCall

pytestmark = pytest.mark.unit


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
