"""How a reward function is named, found and called. Torch-free: it runs inside the scoring processes.

A function takes arguments by name (`dovetail.rewards.signatures`), plus its own keyword arguments, and returns a number
or a dict with `score` and further columns; it may be `async`. A batch function takes lists and returns one.
"""

from __future__ import annotations

import importlib
import inspect
import math
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.config.user_code import load_user_object
from dovetail.rewards.decoding import DecoderSource
from dovetail.rewards.errors import RewardError
from dovetail.rewards.signatures import ARGUMENTS, BATCH_ARGUMENTS, MissingColumnError, adapt_function

NUMBER = struct.Struct("<Q")
"""Before every message to and from a scoring process: of which call it is."""


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function by address, so that a fresh process can find it. `weight` counts in a combination."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    key: str = "custom_reward_function.path"

    @property
    def label(self) -> str:
        """Short name in the columns of a combination."""
        return str(self.kwargs.get("rule", self.name))


@dataclass(frozen=True)
class StartMessage:
    """The first thing a scoring process is told."""

    search_path: list[str]
    specs: tuple[FunctionSpec, ...]
    is_batch: bool
    import_modules: tuple[str, ...]
    decoder: DecoderSource | None = None
    columns: tuple[str, ...] | None = None
    """Of the rows, which a function may ask for by name; None: not known."""
    async_calls: int = 1
    timeout_seconds: float = 300.0
    """Of each call where several run at a time; else the driver keeps time."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return BATCH_ARGUMENTS if self.is_batch else ARGUMENTS


def load_function(
    spec: FunctionSpec, arguments: Sequence[str] = ARGUMENTS, columns: Sequence[str] | None = None
) -> Callable[..., Any]:
    """Import the function, and make it one that takes the arguments it will be given."""
    importlib.invalidate_caches()
    function = load_user_object(spec.path, spec.name, key=spec.key)
    if not callable(function):
        raise RewardError(f"{spec.name} of {spec.path} is a {type(function).__name__}, not a function.")
    try:
        return adapt_function(function, arguments, spec.kwargs, columns)
    except MissingColumnError as error:
        raise RewardError(f"{spec.name} of {spec.path}: {error} All data files need it, validation's too.") from None
    except TypeError as error:
        shown = ", ".join([*arguments, *spec.kwargs])
        raise RewardError(f"{spec.name} of {spec.path} cannot be called with ({shown}): {error}") from None


class EventLoop(Protocol):
    """What is asked of asyncio's: this module is imported at the start of every scoring process, asyncio is not."""

    def run_until_complete(self, coroutine: Coroutine[Any, Any, Any], /) -> Any: ...


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any], loop: EventLoop) -> Any:
    """Call a plain or an async function and wait for what it returns."""
    result = function(**arguments)
    return loop.run_until_complete(_await(result)) if inspect.isawaitable(result) else result


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a function as `load_function` gives it, or an object that is called, is `async def`."""
    # Not `inspect.unwrap`: a decorator of the user's may have made a plain function of an async one.
    original = getattr(function, "adapted_from", function)
    return inspect.iscoroutinefunction(original) or inspect.iscoroutinefunction(type(original).__call__)


def read_result(result: Any) -> dict[str, Any]:
    """A returned value as `{"score": float, ...}`; raises `ValueError` for what is no finite score."""
    columns = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in columns:
        raise ValueError(f"the reward dict has no 'score', only {', '.join(map(str, columns)) or 'nothing'}; add one.")
    score = columns["score"]
    try:
        if isinstance(score, (str, bytes)):
            raise TypeError("text is no score, even where it reads as a number")
        columns["score"] = float(score)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        raise ValueError(
            f"the reward is {repr(score)[:80]}, a {type(score).__name__}; return a number or a dict with 'score'."
        ) from None
    if not math.isfinite(columns["score"]):
        raise ValueError(f"the reward is {columns['score']}; return a finite number, or raise to mark a failure.")
    return {str(name): _plain(value) for name, value in columns.items()}


def combine_results(results: Sequence[dict[str, Any]], specs: Sequence[FunctionSpec]) -> dict[str, Any]:
    """The weighted sum of several rewards; each one's own score stays visible as `score/<name>`, with its number behind
    a name that several have."""
    if len(results) == 1 and specs[0].weight == 1.0:
        return results[0]
    combined: dict[str, Any] = {"score": 0.0}
    labels = [spec.label for spec in specs]
    for number, (result, spec) in enumerate(zip(results, specs, strict=True), start=1):
        combined["score"] += spec.weight * result["score"]
        own = spec.label if labels.count(spec.label) == 1 else f"{spec.label}_{number}"
        combined[f"score/{own}"] = result["score"]
        for name, value in result.items():
            combined.setdefault(name, value)
    return combined


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's: the results cross a process boundary to a reader without the library."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value
