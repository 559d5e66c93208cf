"""`@tool`: a Python function that a model can call, and a toolbox of such functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from dovetail.agents.tools.schema import ArgumentError, Signature, ToolError, read_signature
from dovetail.agents.tools.threads import call_function
from dovetail.agents.types import InfrastructureError, Message, OpenTools, Task, Toolbox, ToolCall, ToolResult

INVALID = "invalid call"
_MARK = "__dovetail_tool__"
_MAX_ERROR = 1000
"""Characters of an exception that the model is shown."""

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Function], Function]: ...
def tool(function: Any = None, /, *, name: str | None = None, description: str | None = None) -> Any:
    """Mark a function as a tool: its type hints and its Google docstring are what the model is shown.

    The function stays as it is. A sync one runs in a thread, an async one is awaited. It returns text, a JSON value or
    a `ToolResult` (with a reward, or `done` to end the conversation).
    """

    def mark(function: Any) -> Any:
        setattr(function, _MARK, read_signature(function, name=name, description=description))
        return function

    return mark if function is None else mark(function)


def is_tool(value: Any) -> bool:
    """Whether a value is a function marked with `@tool`."""
    return callable(value) and isinstance(getattr(value, _MARK, None), Signature)


def signature_of(function: Callable[..., Any]) -> Signature:
    """The mark of `@tool`, or the signature of a plain function."""
    return getattr(function, _MARK, None) or read_signature(function)


def as_result(value: Any) -> ToolResult:
    """What a function returned, as the model sees it: text as it is, everything else as JSON."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if value is None:
        return ToolResult("")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return ToolResult(json.dumps(value, ensure_ascii=False, default=str))


class Functions(OpenTools):
    """The open tools of one trajectory, where tools are functions. `FunctionToolbox` and classes build on it."""

    def __init__(self, functions: Mapping[str, tuple[Signature, Callable[..., Any]]]) -> None:
        self._functions = dict(functions)
        self.schemas = [signature.schema for signature, _ in self._functions.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        """A wrong name, wrong arguments and an exception of the tool are observations."""
        if problem := problem_of(call, self._functions):
            return problem
        signature, function = self._functions[call.name]
        try:
            arguments = signature.bind(call.arguments or {})
        except ArgumentError as error:
            return ToolResult(f"Error: wrong arguments for {call.name}: {error}.", failure=INVALID)
        return await guard(call.name, self._run(function, arguments))

    async def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        return await call_function(function, **arguments)

    def state(self) -> Any:
        """Functions remember nothing."""
        return {}


def problem_of(call: ToolCall, known: Iterable[str]) -> ToolResult | None:
    """An observation for a call that cannot be carried out: not valid text, or a tool that is not there."""
    if call.arguments is None:
        problem = f"the call could not be read: {call.error or 'its arguments are not a JSON object'}"
    elif call.name not in known:
        problem = f"there is no tool {call.name!r}; the tools are {', '.join(known) or 'none'}"
    else:
        return None
    return ToolResult(f"Error: {problem}.", failure=INVALID)


async def guard(name: str, result: Any) -> ToolResult:
    """The result of an awaitable; an exception of the tool's own code is an observation."""
    try:
        return as_result(await result)
    except InfrastructureError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  the policy sees it, as a person at a shell would
        return ToolResult(f"Error: {name} failed: {type(error).__name__}: {error}"[:_MAX_ERROR], failure="exception")


class FunctionToolbox(Toolbox):
    """Tools that are functions, the same ones for every trajectory."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions: dict[str, tuple[Signature, Callable[..., Any]]] = {}
        for function in functions:
            signature = signature_of(function)
            if signature.name in self._functions:
                raise ToolError(f"Two tools are called {signature.name}; rename one with @tool(name=...).")
            self._functions[signature.name] = (signature, function)

    async def open(self, task: Task, state: Any = None) -> tuple[Functions, list[Message]]:
        return Functions(self._functions), []
