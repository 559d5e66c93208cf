"""Environments in the manner of gym: the model's text is the action, an observation comes back. No tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from dovetail.agents.tools.classes import can_restore, made_by, reward_of
from dovetail.agents.tools.functions import problem_of
from dovetail.agents.tools.threads import call_function
from dovetail.agents.types import Message, Task, Toolbox, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class Step:
    """What an action led to."""

    observation: str = ""
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """Numbers in it become metrics: `tool/<name>`."""


class Environment:
    """Subclass it and write `reset` and `step`, sync (they run in a thread) or async.

    Add `state` and `restore` for an exact resume: after a restart `reset(task)` is called, then `restore(state)`.
    """

    scores: bool = True
    """The rewards of the steps, and `get_reward()` where there is one, are the score: 0 where there was no step. With
    False the reward function of the run scores, and rewards of steps are added."""

    def reset(self, task: Task) -> Any:
        """The first observation, as text or messages that follow the prompt. None: the prompt is enough."""
        return None

    def step(self, action: str) -> Any:
        """A `Step`, or gym's tuple (observation, reward, done, info) or (.., terminated, truncated, info)."""
        raise NotImplementedError(f"{type(self).__name__} has no step(action).")

    def close(self) -> Any:
        """Give back what the environment holds."""
        return None


def as_step(value: Any) -> Step:
    """What `step` returned. Raises `TypeError` for what is no step."""
    if isinstance(value, Step):
        return value
    if isinstance(value, tuple) and len(value) in (4, 5):
        observation, reward, *ends, info = value
        return Step(str(observation), None if reward is None else float(reward), any(ends), info or {})
    raise TypeError(f"step returned {value!r}; return a Step, or (observation, reward, done, info).")


class Environments(Toolbox):
    """An environment for each trajectory."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make

    async def open(self, task: Task, state: Any = None) -> tuple[OpenEnvironment, list[Message]]:
        async with made_by(self._make) as environment:
            first = await call_function(environment.reset, task)
            if state is not None:
                await call_function(environment.restore, state)
        messages = [{"role": "user", "content": first}] if isinstance(first, str) and first else list(first or [])
        return OpenEnvironment(environment), messages


class OpenEnvironment:
    """One trajectory's environment: it responds to what the model writes, and has no tools to call."""

    def __init__(self, environment: Environment) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._environment = environment

    async def call(self, call: ToolCall) -> ToolResult:
        return problem_of(call, ()) or ToolResult("")

    async def respond(self, messages: list[Message]) -> ToolResult:
        """The action is the text of the model's last message."""
        step = as_step(await call_function(self._environment.step, str(messages[-1].get("content") or "")))
        numbers = {key: float(value) for key, value in step.info.items() if isinstance(value, Real)}  # numpy's, too
        return ToolResult(step.observation, step.reward, step.done, numbers)

    async def reward(self) -> float | None:
        """What is added to the rewards of the steps; None: the reward function of the run scores."""
        if not self._environment.scores:
            return None
        return await reward_of(self._environment) or 0.0

    def state(self) -> Any:
        """None for an environment without `state` and `restore`: its trajectories begin again after a resume."""
        environment: Any = self._environment
        return environment.state() if can_restore(environment) else None

    async def close(self) -> None:
        await call_function(self._environment.close)
