"""Several toolboxes as one, of which a row may choose tools (`tool_selection`, as in verl)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from dovetail.agents.tools.functions import problem_of
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import Message, OpenTools, Task, Toolbox, ToolCall, ToolResult


def combine(toolboxes: Sequence[Toolbox]) -> Toolbox:
    """One toolbox with the tools of all. At most one of them may respond or score."""
    return CombinedToolbox(toolboxes)


class CombinedToolbox:
    """The tools of several toolboxes."""

    def __init__(self, toolboxes: Sequence[Toolbox]) -> None:
        self._toolboxes = list(toolboxes)

    async def open(self, task: Task, state: Any = None) -> tuple[OpenTools, list[Message]]:
        from dovetail.agents.verl.adapters import extra_of

        selected, states = extra_of(task, "tool_selection"), [state] if len(self._toolboxes) == 1 else state
        async with contextlib.AsyncExitStack() as opened:
            parts, messages = [], []
            for number, toolbox in enumerate(self._toolboxes):
                part, added = await toolbox.open(task, None if states is None else states[number])
                opened.push_async_callback(part.close)
                parts.append(part)
                messages += added
            tools: OpenTools = parts[0]
            if len(parts) > 1 or selected is not None:
                combined = _RespondingTools if any(hasattr(part, "respond") for part in parts) else _CombinedTools
                tools = combined(parts, selected)
            opened.pop_all()
            return tools, messages

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for toolbox in self._toolboxes:
                stack.push_async_callback(toolbox.close)


class _CombinedTools:
    def __init__(self, parts: Sequence[OpenTools], selected: Collection[str] | None) -> None:
        self._parts = list(parts)
        self._by_name: dict[str, OpenTools] = {}
        for part in parts:
            for schema in part.schemas:
                name = schema["function"]["name"]
                if name in self._by_name:
                    raise ToolError(f"Two tools are called {name}; rename one of them, or leave one out.")
                self._by_name[name] = part
        if selected is not None:
            selected = set(selected)  # a column may be numpy's
            if unknown := selected - self._by_name.keys():
                raise ToolError(f"tool_selection names {sorted(unknown)}; the tools are {sorted(self._by_name)}.")
            self._by_name = {name: part for name, part in self._by_name.items() if name in selected}
        schemas = [schema for part in parts for schema in part.schemas]
        self.schemas = [schema for schema in schemas if schema["function"]["name"] in self._by_name]

    async def call(self, call: ToolCall) -> ToolResult:
        return problem_of(call, self._by_name) or await self._by_name[call.name].call(call)

    async def reward(self) -> float | None:
        rewards = [reward for part in self._parts if (reward := await part.reward()) is not None]
        return sum(rewards) if rewards else None

    def state(self) -> Any:
        states = [part.state() for part in self._parts]
        if any(state is None for state in states):
            return None
        return states[0] if len(states) == 1 else states

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # all of them, also where one fails
            for part in self._parts:
                stack.push_async_callback(part.close)


class _RespondingTools(_CombinedTools):
    """With a simulated user or an environment among them."""

    async def respond(self, messages: list[Message]) -> ToolResult | None:
        part: Any = next(part for part in self._parts if hasattr(part, "respond"))
        return await part.respond(messages)
