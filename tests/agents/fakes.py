"""A renderer of code points, an engine that says what a test wrote for it, and an event loop whose time is virtual."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from dovetail.agents.session import Session, SessionSettings
from dovetail.agents.types import Message, ToolCall
from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams

T = TypeVar("T")

STOP = 2
ROLES = {"system": 1000, "user": 1001, "assistant": 1002, "tool": 1003}


class FakeRenderer:
    """A message is its role's id, its code points and the stop token. Roles in `rewrites` change the history."""

    stop_token_ids = (STOP,)

    def __init__(self, rewrites: tuple[str, ...] = ()) -> None:
        self.rewrites = rewrites

    def start(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, rendered: Any = None
    ) -> list[int]:
        return [*([999] if tools else []), *self._render(messages), ROLES["assistant"]]

    def extend(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        closed: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        stop_id: int | None = None,
        rendered: Any = None,
    ) -> list[int] | None:
        if any(message["role"] in self.rewrites for message in new):
            return None
        return [*([] if closed else [STOP]), *self._render(new), ROLES["assistant"]]

    class tokenizer:
        @staticmethod
        def decode(ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join(chr(token) for token in ids if token < 900 and token != STOP)

    def tokens_before(self, ids: Sequence[int], texts: Sequence[str], *, inclusive: bool = False) -> int:
        whole = "".join(map(chr, ids))
        ends = [whole.find(text) + inclusive * len(text) for text in texts if text in whole]
        return min(ends, default=len(ids))

    def _render(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [ROLES[message["role"]], *map(ord, message["content"] or ""), STOP]
        return ids


def parse(token_ids: Sequence[int], tools: Any = ()) -> tuple[str, list[ToolCall]]:
    """Text; a turn that begins with `!` calls: `!name argument; !name argument`."""
    text = "".join(map(chr, token_ids))
    if not text.startswith("!"):
        return text, []
    calls = [part.strip()[1:].partition(" ") for part in text.split(";")]
    return "", [
        ToolCall(
            name, None if value == "bad" else {"x": value}, text=f"!{name} {value}", error="no value" * (value == "bad")
        )
        for name, _, value in calls
    ]


class FakeEngine:
    """Gives `answers` in order, after `seconds`; a callable answers by request. Remembers what it was asked."""

    def __init__(
        self, *answers: str, seconds: float = 0.0, by: Callable[[GenerationRequest], str] | None = None
    ) -> None:
        self.answers = list(answers)
        self.seconds = seconds
        self.by = by
        self.requests: list[GenerationRequest] = []
        self.aborted: dict[str, asyncio.Event] = {}
        self.version = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        text = self.by(request) if self.by else self.answers.pop(0)
        aborted = self.aborted.setdefault(request.request_id, asyncio.Event())
        reason: Any = "stop"
        try:
            async with asyncio.timeout(self.seconds):
                await aborted.wait()
                text, reason = text[:1], "abort"
        except TimeoutError:
            pass
        ids = [*map(ord, text), *([STOP] if reason == "stop" else [])]
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], "length"
        versions = [self.version] * len(ids)
        return GenerationResult(request.request_id, 0, ids, [-0.5] * len(ids), reason, versions)

    def abort(self, request_id: str) -> None:
        self.aborted[request_id].set()


def session_over(
    engine: FakeEngine,
    *,
    renderer: FakeRenderer | None = None,
    prompt_length: int = 100,
    response_length: int = 100,
    seed: int | None = 7,
    state: Any = None,
    name: str = "s",
    **settings: Any,
) -> Session:
    common = SessionSettings(renderer or FakeRenderer(), parse, prompt_length, response_length, **settings)
    sampling = SamplingParams(seed=seed, stop_token_ids=(STOP,))
    return Session(name, common, engine.generate, sampling, sample_index=3, abort=engine.abort, state=state)


class _VirtualSelector(selectors.SelectSelector):
    """Never waits: it moves the loop's clock to when the next timer is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("every task waits, and no timer would wake one: a wait without a deadline")
        if not events and timeout:
            self.now += timeout
        return events


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and the seconds that would have passed. Waiting without a deadline fails."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        result = runner.run(work)
        return result, runner.get_loop().time()
