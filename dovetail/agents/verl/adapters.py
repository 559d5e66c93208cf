"""verl's tools and simulated users as toolboxes. Differs from verl: an instance lives as long as its trajectory.

Rewards of a single call or turn are metrics, as in verl: the run's reward function scores the trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dovetail.agents.deadlines import place_in
from dovetail.agents.tools.functions import guard, problem_of
from dovetail.agents.tools.observations import without_media
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.tools.threads import call_function
from dovetail.agents.types import Message, OpenTools, Task, Toolbox, ToolCall, ToolResult
from dovetail.config.signatures import named_arguments


def extra_of(task: Task, name: str) -> Any:
    """A column of verl's rows: in `extra_info`, or by itself."""
    extra = task.row.get("extra_info")
    value = extra.get(name) if isinstance(extra, Mapping) else None
    return task.row.get(name) if value is None else value


def as_result(returned: Any, *, name: str) -> ToolResult:
    """What verl's tools return: a response, or a tuple of response, reward and metrics."""
    response, reward, metrics = (*returned, None, None)[:3] if isinstance(returned, tuple) else (returned, None, None)
    numbers = {key: float(value) for key, value in dict(metrics or {}).items() if isinstance(value, (int, float))}
    if reward is not None:
        numbers[f"tool_reward/{name}"] = float(reward)
    if hasattr(response, "is_text_only"):
        media = [kind for kind in ("image", "video") if getattr(response, kind)]
        return replace(without_media(name, response.text or "", media), metrics=numbers)
    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False, default=str)
    return ToolResult(text, metrics=numbers)


async def call_named(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call with what the signature names; with everything where it takes **kwargs."""
    return await call_function(function, *args, **named_arguments(function, given))


class VerlToolbox(Toolbox):
    """Instances of `BaseTool` subclasses."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self._tools = {schema_of(tool)["function"]["name"]: tool for tool in tools}

    async def open(self, task: Task, state: Any = None) -> tuple[OpenVerlTools, list[Message]]:
        return OpenVerlTools(self._tools, task), []


class OpenVerlTools(OpenTools):
    """Creates an instance at a tool's first call; releases it at the end."""

    def __init__(self, tools: Mapping[str, Any], task: Task) -> None:
        self._tools = tools
        self._kwargs = extra_of(task, "tools_kwargs") or {}
        self._instances: dict[str, Any] = {}
        self._creating = asyncio.Semaphore(1)  # calls of a turn may run at once, and share an instance
        self._agent_data = SimpleNamespace(
            messages=task.messages, tools_kwargs=self._kwargs, request_id=f"{task.uid}-{task.sample}", extra_fields={}
        )
        self.schemas = [schema_of(tool) for tool in tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        return problem_of(call, self._tools) or await guard(call.name, self._execute(call))

    async def _execute(self, call: ToolCall) -> ToolResult:
        tool, kwargs = self._tools[call.name], self._kwargs.get(call.name) or {}
        async with place_in(self._creating):
            if call.name not in self._instances:
                # Of one version of verl the arguments are in `create_kwargs`, of another they stand by themselves.
                given = kwargs.get("create_kwargs") or {}
                created = await call_named(tool.create, **{**given, "create_kwargs": given})
                self._instances[call.name] = created[0] if isinstance(created, tuple) else created
        given = {**(kwargs.get("execute_kwargs") or {}), "agent_data": self._agent_data}
        returned = await call_named(tool.execute, self._instances[call.name], call.arguments, **given)
        return as_result(returned, name=call.name)

    def state(self) -> Any:
        """Only until the first call: what an instance remembers is its own."""
        return None if self._instances else {}

    async def close(self) -> None:
        instances, self._instances = self._instances, {}
        async with contextlib.AsyncExitStack() as stack:  # all of them, also where one fails
            for name, instance in instances.items():
                kwargs = (self._kwargs.get(name) or {}).get("release_kwargs") or {}
                stack.push_async_callback(call_named, self._tools[name].release, instance, **kwargs)


def schema_of(tool: Any) -> dict[str, Any]:
    """A tool's schema as the chat template takes it."""
    schema = tool.tool_schema
    return schema if isinstance(schema, dict) else schema.model_dump(exclude_none=True, exclude_unset=True)


class InteractionToolbox(Toolbox):
    """Instances of `BaseInteraction` subclasses, by name; a row chooses in `interaction_kwargs.name`."""

    def __init__(self, interactions: Mapping[str, Any]) -> None:
        self._interactions = dict(interactions)

    async def open(self, task: Task, state: Any = None) -> tuple[OpenInteraction, list[Message]]:
        kwargs = dict(extra_of(task, "interaction_kwargs") or {})
        name = kwargs.get("name")
        if name is None and len(self._interactions) == 1:
            name = next(iter(self._interactions))
        if name not in self._interactions:
            raise ToolError(
                f"A row has interaction_kwargs.name={name!r}; the interactions are {', '.join(self._interactions)}."
            )
        interaction = self._interactions[name]
        instance = f"{task.uid}-{task.sample}-{task.attempt}"
        await call_named(interaction.start_interaction, instance, **kwargs)
        return OpenInteraction(interaction, instance, kwargs), []


class OpenInteraction(OpenTools):
    """One trajectory's simulated user."""

    def __init__(self, interaction: Any, instance: str, kwargs: Mapping[str, Any]) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._interaction, self._instance, self._kwargs = interaction, instance, kwargs

    async def call(self, call: ToolCall) -> ToolResult:
        return problem_of(call, ()) or ToolResult("")

    async def respond(self, messages: list[Message]) -> ToolResult:
        done, text, score, _ = await call_named(
            self._interaction.generate_response, self._instance, messages, **self._kwargs
        )
        return ToolResult(text or "", done=bool(done), metrics={} if score is None else {"turn_score": float(score)})

    async def close(self) -> None:
        finalize = self._interaction.finalize_interaction
        takes_id = bool(inspect.signature(finalize).parameters)
        await (call_named(finalize, self._instance, **self._kwargs) if takes_id else call_function(finalize))
