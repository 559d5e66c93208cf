"""`CheckedTools`: the tools of one trajectory behind deadlines, retries and limits of length, recorded for a resume.

What the policy did wrong is an observation, and so is a call that takes too long. `InfrastructureError` is tried again;
what is left of it ends the trajectory. Knows no engine and no chat template.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from dovetail.agents.deadlines import DeadlineError, within
from dovetail.agents.session import Session, TrajectoryEnd
from dovetail.agents.tools.observations import run_calls, truncate_text
from dovetail.agents.types import (
    InfrastructureError,
    Message,
    Task,
    Toolbox,
    ToolCall,
    ToolResult,
    Turn,
    checked_reward,
)

T = TypeVar("T")

_RETRY_S = 0.5
"""Before the first retry of what failed around a tool; doubled for each further one."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """`rollout.multi_turn.*`, as far as it is about calls."""

    tool_timeout_s: float = 60.0
    infra_attempts: int = 3
    max_parallel_calls: int = 1
    max_user_turns: int | None = None
    max_tool_response_length: int = 256
    truncate_side: Literal["left", "middle", "right"] = "middle"
    shorten: Callable[[str], str] | None = None
    """Cuts a text to the most tokens of a tool response."""


class CheckedTools:
    """What a loop finds in `session.tools`. Build one with `open`."""

    def __init__(self, tools: Any, opening: list[Message], session: Session, settings: CallSettings) -> None:
        self.opening = opening
        """Messages that the environment adds to the prompt."""
        self.settings = settings
        self.running: list[tuple[str, float]] = []
        """Name and start, in seconds since the epoch, of the calls that run."""
        self._tools = tools
        self._session = session
        self._results: dict[int, ToolResult] = {}  # by the number of the call
        self._num_asked = 0
        self._num_running = 0
        self._before: tuple[Any, dict[int, ToolResult]] = (None, {})  # state and results when nothing ran

    @classmethod
    async def open(
        cls, toolbox: Toolbox, task: Task, session: Session, settings: CallSettings, state: Any = None
    ) -> CheckedTools:
        """The trajectory's tools. With the `state` of another one, calls give what was recorded; then they go on."""
        state = state or {}
        tools, opening = await _retried(lambda: toolbox.open(task, state.get("tools")), "the tools", session, settings)
        checked = cls(tools, state.get("opening", opening), session, settings)
        checked._results = {int(number): ToolResult(**result) for number, result in state.get("results", {}).items()}
        return checked

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return self._tools.schemas

    def after(self, prompt: list[Message]) -> list[Message]:
        """The prompt and what the environment adds to it. Many templates refuse two messages of the user in a row, so
        the first observation joins a prompt that ends with one."""
        if prompt and self.opening and prompt[-1]["role"] == self.opening[0]["role"] == "user":
            last, first = prompt[-1]["content"], self.opening[0]["content"]
            if isinstance(last, str) and isinstance(first, str):
                return [*prompt[:-1], {**prompt[-1], "content": f"{last}\n\n{first}"}, *self.opening[1:]]
        return [*prompt, *self.opening]

    @property
    def responds(self) -> bool:
        """Whether a simulated user or an environment answers turns without calls."""
        return hasattr(self._tools, "respond")

    async def call_all(self, turn: Turn) -> list[ToolResult]:
        """The results of a turn's calls, in order; they run at most `max_parallel_calls` at a time."""
        numbered = [(self._next_number(), call) for call in turn.calls]
        return await run_calls(
            numbered, lambda one: self._call(*one, turn.node), max_parallel=self.settings.max_parallel_calls
        )

    async def call(self, call: ToolCall, turn: Turn | None = None) -> ToolResult:
        """The result of one call."""
        return await self._call(self._next_number(), call, None if turn is None else turn.node)

    async def respond(self, messages: list[Message], turn: Turn | None = None) -> ToolResult | None:
        """What a simulated user or an environment says to a turn without calls; None where there is none."""
        if not self.responds:
            return None
        number, node = self._next_number(), None if turn is None else turn.node

        async def run() -> ToolResult:
            try:
                response = await self._attempts(lambda: self._tools.respond(list(messages)), "the environment", node)
            except DeadlineError as error:
                raise TrajectoryEnd("time_limit") from error
            return _OVER if response is None else response

        result = await self._recorded(number, run, {"name": "respond", "turn": node})
        return None if result == _OVER else result

    async def reward(self) -> float | None:
        """The environment's own score of the trajectory."""
        return await _retried(self._tools.reward, "the reward", self._session, self.settings)

    async def close(self) -> None:
        await within(self.settings.tool_timeout_s, self._tools.close())

    def state(self) -> dict[str, Any] | None:
        """For `open`, a JSON value; None where the tools cannot be brought back to where they are.

        Calls that run now will run again: the state is that from before them.
        """
        tools, results = self._before if self._num_running else (self._tools.state(), self._results)
        if tools is None and results:
            return None
        recorded = {str(number): asdict(result) for number, result in results.items()}
        return {"tools": tools, "opening": self.opening, "results": recorded}

    # ---- inside ----

    def _next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked - 1

    async def _call(self, number: int, call: ToolCall, turn: int | None) -> ToolResult:
        arguments = call.text if call.arguments is None else call.arguments
        event = {"name": call.name, "arguments": arguments, "turn": turn}

        async def run() -> ToolResult:
            if call.arguments is None:
                event["failure"] = "invalid call"
                return ToolResult(f"Error: the call could not be read: {call.error}.")
            try:
                return await self._attempts(lambda: self._tools.call(call), call.name, turn)
            except DeadlineError as error:
                event["failure"] = "timeout"
                return ToolResult(f"Error: {call.name} timed out after {error.seconds:g} s.")
            except (InfrastructureError, TrajectoryEnd):
                raise
            except Exception as error:  # noqa: BLE001 - the policy sees it, as a person at a shell would
                event["failure"] = "exception"
                return ToolResult(f"Error: {call.name} failed: {type(error).__name__}: {error}")

        return await self._recorded(number, run, event)

    async def _attempts(self, work: Callable[[], Coroutine[Any, Any, T]], what: str, turn: int | None) -> T:
        return await _retried(work, what, self._session, self.settings, turn=turn, timed=False)

    async def _recorded(
        self, number: int, run: Callable[[], Awaitable[ToolResult]], event: dict[str, Any]
    ) -> ToolResult:
        """What was recorded under this number; else what `run` gives, cut to its length, with an event."""
        if number in self._results:
            return self._results[number]
        if not self._num_running:
            self._before = copy.deepcopy(self._tools.state()), dict(self._results)
        self._num_running += 1
        began = asyncio.get_running_loop().time()
        running = (str(event["name"]), time.time())
        self.running.append(running)
        try:
            result = await run()
            reward = None if result.reward is None else checked_reward(result.reward, "the reward of a turn")
            metrics = {name: float(value) for name, value in result.metrics.items()}  # numpy's are no JSON
            result = replace(result, text=self._shortened(result.text), reward=reward, metrics=metrics)
            event["result"] = result.text
            if metrics and result != _OVER:
                event["metrics"] = metrics
            if result.failure:
                event["failure"] = result.failure
            self._results[number] = result
            return result
        except InfrastructureError:
            event["failure"] = "infra"
            raise
        except TrajectoryEnd:
            event["failure"] = "timeout"
            raise
        finally:
            self._num_running -= 1
            self.running.remove(running)
            seconds = asyncio.get_running_loop().time() - began
            self._session.events.append({"kind": "tool", "seconds": seconds, **event})

    def _shortened(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # no half characters, which a tokenizer refuses
        text = truncate_text(text, self.settings.max_tool_response_length, self.settings.truncate_side)
        return text if self.settings.shorten is None else self.settings.shorten(text)


_OVER = ToolResult("", done=True, metrics={"conversation_over": 1.0})
"""Stands in the record for a user who has nothing more to say."""


async def _retried(
    work: Callable[[], Coroutine[Any, Any, T]],
    what: str,
    session: Session,
    settings: CallSettings,
    *,
    turn: int | None = None,
    timed: bool = True,
) -> T:
    """The result of `work`, started again after an `InfrastructureError`; with `timed`, its deadline is one, too."""
    for attempt in range(settings.infra_attempts):
        try:
            return await within(settings.tool_timeout_s, work())
        except (InfrastructureError, DeadlineError) as error:
            if isinstance(error, DeadlineError) and not timed:
                raise
            why = str(error) or type(error).__name__
            if attempt + 1 == settings.infra_attempts:
                raise InfrastructureError(f"{what}: {why} ({settings.infra_attempts} attempts)") from error
            session.events.append({"kind": "retry", "turn": turn, "name": what, "failure": why})
            await asyncio.sleep(_RETRY_S * 2**attempt)
    raise AssertionError("infra_attempts is at least 1")
