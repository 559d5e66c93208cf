"""A class whose public methods are tools: an instance for each trajectory, so that it can remember and score.

The contract is TRL's: `reset(**row) -> str | None` begins a trajectory, `get_reward()` scores it at the end; both are
optional, sync or async. `state()` and `restore(state)` make a resume exact, `close()` gives resources back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from dovetail.agents.deadlines import place_in
from dovetail.agents.tools.functions import Functions, signature_of
from dovetail.agents.tools.schema import Signature, ToolError
from dovetail.agents.tools.threads import call_function
from dovetail.agents.types import Message, Task, Toolbox, checked_reward
from dovetail.config.signatures import missing_arguments, named_arguments

_CONTRACT = frozenset({"reset", "get_reward", "state", "restore", "close"})


def row_of(task: Task) -> dict[str, Any]:
    """What `reset(**row)` gets: the columns of the row, those of its extra_info, and ground_truth, prompt and seed."""
    extra, reward_model = task.row.get("extra_info"), task.row.get("reward_model")
    row: dict[str, Any] = {"seed": task.seed}
    if isinstance(extra, Mapping):
        row |= extra
    row["prompt"] = task.messages  # extra_info has it as the file wrote it
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        row["ground_truth"] = reward_model["ground_truth"]
    return row | dict(task.row)


class ClassToolbox(Toolbox):
    """Makes an instance of `cls` for each trajectory."""

    def __init__(self, cls: Callable[[], Any], signatures: Mapping[str, Signature] | None = None) -> None:
        """`signatures` by name of the method, where `cls` is a factory and no class."""
        self._cls = cls
        self._signatures = read_methods(cls) if signatures is None and isinstance(cls, type) else dict(signatures or {})
        if not self._signatures:
            name = getattr(cls, "__name__", str(cls))
            raise ToolError(f"{name} has no tools; each of its public methods but {', '.join(_CONTRACT)} is one.")

    async def open(self, task: Task, state: Any = None) -> tuple[OpenInstance, list[Message]]:
        messages: list[Message] = []
        async with made_by(self._cls) as instance:
            if (reset := getattr(instance, "reset", None)) is not None:
                text = await call_function(reset, **_accepted(reset, row_of(task)))
                messages = [{"role": "user", "content": text}] if text else []
            if state is not None:
                await call_function(instance.restore, state)
        return OpenInstance(instance, self._signatures), messages


class OpenInstance(Functions):
    """The methods of one instance. They run one at a time, whatever `max_parallel_calls` says."""

    def __init__(self, instance: Any, signatures: Mapping[str, Signature]) -> None:
        methods = {signature.name: (signature, getattr(instance, name)) for name, signature in signatures.items()}
        super().__init__(methods)
        self._instance = instance
        self._turn = asyncio.Semaphore(1)

    async def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        async with place_in(self._turn):
            return await call_function(function, **arguments)

    async def reward(self) -> float | None:
        return await reward_of(self._instance)

    def state(self) -> Any:
        """None for a class without `state` and `restore`: its trajectories begin again after a resume."""
        return self._instance.state() if can_restore(self._instance) else None

    async def close(self) -> None:
        if (close := getattr(self._instance, "close", None)) is not None:
            await call_function(close)


async def reward_of(instance: Any) -> float | None:
    """What its `get_reward` returns; None where it has none."""
    if (get_reward := getattr(instance, "get_reward", None)) is None:
        return None
    return checked_reward(await call_function(get_reward), f"the reward of {type(instance).__name__}.get_reward")


def can_restore(instance: Any) -> bool:
    """Whether an object has both `state` and `restore`."""
    return callable(getattr(instance, "state", None)) and callable(getattr(instance, "restore", None))


@contextlib.asynccontextmanager
async def made_by(make: Callable[[], Any]) -> AsyncIterator[Any]:
    """A new object; closed if it cannot be made ready, since whoever asked for it tries again with another.

    One whose constructor outlasts the deadline is closed when that ends: nobody waits for a call that was cancelled.
    """
    making = asyncio.ensure_future(call_function(make))
    try:
        yield await asyncio.shield(making)
    except BaseException:
        with contextlib.suppress(Exception):
            if (close := getattr(await making, "close", None)) is not None:
                await call_function(close)
        raise


def read_methods(cls: type) -> dict[str, Signature]:
    """The public methods of a class, inherited ones too, as tools."""
    functions = inspect.getmembers(cls, inspect.isfunction)
    names = [name for name, _ in functions if not name.startswith("_") and name not in _CONTRACT]
    # Bound to nothing: the signature without `self`, which a static method does not have.
    unbound = object()
    return {name: signature_of(inspect.getattr_static(cls, name).__get__(unbound, cls)) for name in names}


def _accepted(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """What `reset` names; everything where it has **row."""
    if missing := missing_arguments(reset, row):
        raise ToolError(
            f"{getattr(reset, '__qualname__', 'reset')} asks for {', '.join(missing)}, which the row does not have; it "
            f"has {', '.join(sorted(row))}."
        )
    return named_arguments(reset, row)
