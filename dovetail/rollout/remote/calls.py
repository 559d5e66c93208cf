"""Samples being generated: one call each, ended and continued at will. Knows nothing of how weights change."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dovetail.observability.waits import waiting
from dovetail.rollout.base import EngineError
from dovetail.rollout.remote.client import ServerGoneError, ask_each
from dovetail.rollout.remote.dialect import Dialect
from dovetail.rollout.remote.pool import NoServerError, ServerPool
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.rollout.response import of_requests
from dovetail.rollout.stream import check_new_ids

_ANSWER_S = 0.3  # an aborted call answers within this, or is asked again
_FIRST_ANSWER_S = 0.02  # sooner at first: a server forgets to abort a call that it has not seen yet
_GIVE_UP_S = 10.0
_FAIL_S = 60.0
_SHUT_S = 1800.0
"""A weight update is over within this, or is named."""


Ended = Callable[[RemoteSample, BaseException | None], None]


@dataclass(slots=True)
class _AskedVersion:
    """What a server said of its weights when it was last asked."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -math.inf
    version: int | None = None


class SampleCalls:
    """All methods belong to one event loop.

    `version` is that of the servers' weights; it may change while the gate is shut and no call runs. With
    `must_match`, a server that wrote with another version, because it was started again, is taken out and its response
    is not used. A version is asked for when the response is there: a server that was started again has none from then
    on, so whoever has it now has had it all the time.
    `no_server` is awaited when no server is left: it raises, or shuts the gate until there is one again.
    """

    def __init__(self, pool: ServerPool, dialect: Dialect, no_server: Callable[[EngineError], Awaitable[None]]) -> None:
        self._pool = pool
        self._dialect = dialect
        self._no_server = no_server
        self.version = 0
        self.must_match = False
        self.is_open = True
        self._failure = ""
        self._versions: dict[str, _AskedVersion] = defaultdict(_AskedVersion)
        self._changed = asyncio.Condition()
        self._live: dict[RemoteSample, asyncio.Task[None] | None] = {}  # the event loop alone would not keep the tasks
        # The final dot keeps one name from being the beginning of another: SGLang aborts by prefix.
        self._names = (f"{secrets.token_hex(4)}-{number}." for number in itertools.count())

    @property
    def live(self) -> tuple[RemoteSample, ...]:
        return tuple(self._live)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_running(self) -> int:
        return sum(sample.call is not None for sample in self.live)  # other threads ask

    async def start(self, samples: Sequence[RemoteSample], ended: Ended) -> None:
        """Begin to write them; `ended` is called for each with its failure, or None."""
        new, running = ({sample.request.request_id for sample in some} for some in (samples, self._live))
        check_new_ids(new, running)
        for sample in samples:
            task = asyncio.create_task(self._write(sample))
            self._live[sample] = task
            task.add_done_callback(partial(self._end, sample, ended))

    def _end(self, sample: RemoteSample, ended: Ended, task: asyncio.Task[None]) -> None:
        del self._live[sample]
        if not task.cancelled():
            ended(sample, task.exception())

    async def abort(self, request_ids: Collection[str] | None) -> int:
        """End these (all when None) with what they have; how many."""
        aborted = [sample for sample in of_requests(self._live, request_ids) if sample.finish_reason is None]
        for sample in aborted:
            sample.aborting = True
        tasks = [task for sample in aborted if (task := self._live[sample]) is not None]
        await self._notify()
        await self._end_calls(aborted)
        if tasks:
            await asyncio.wait(tasks, timeout=_FAIL_S)  # then their results are delivered, and their ids free
        return len(aborted)

    async def shut(self, pausing: Iterable[str] = ()) -> None:
        """Begin no call, pause these servers, and return when none of the calls runs any more."""
        self.is_open = False
        pausing = pausing if self._dialect.shared else ()
        answers = await ask_each(map(self._dialect.pause, pausing))  # one that cannot be asked is dead
        running = [sample.call for sample in self._live if sample.call is not None]
        if running and answers:
            await asyncio.wait(running, timeout=_ANSWER_S)
        # What is left reached its server after the pause, where it would wait.
        await self._end_calls(list(self._live))

    async def open(self) -> None:
        self.is_open = True
        await self._notify()

    async def fail(self, reason: str) -> None:
        """End every response that waits with an error. The gate is shut."""
        self._failure = reason
        await self._notify()
        try:
            with waiting("the engine", "responses to end after a failure", limit_s=_FAIL_S) as wait:
                while self._live:
                    wait.check(f"{len(self._live)} are left")
                    await asyncio.sleep(0.01)
        finally:
            self._failure = ""

    async def _write(self, sample: RemoteSample) -> None:
        while sample.finish_reason is None:
            if not self.is_open:
                with waiting(f"request {sample.request.request_id}", "the end of a weight update", limit_s=_SHUT_S):
                    async with self._changed:
                        await self._changed.wait_for(lambda: self.is_open or sample.aborting or self._failure)
            if self._failure:
                raise EngineError(f"request {sample.request.request_id!r} cannot be finished: {self._failure}")
            if sample.aborting:
                sample.finish_reason = "abort"
                return
            version = self.version
            try:
                sample.take(await self._call(sample), version)
            except (NoServerError, ServerGoneError) as error:
                await self._no_server(error)

    async def _call(self, sample: RemoteSample) -> Part:
        key = sample.request.session or sample.request.request_id
        sample.dropped, sample.server = False, ""
        sample.call = asyncio.create_task(self._pool.run(lambda server: self._complete(server, sample), key=key))
        try:
            return await sample.call
        except asyncio.CancelledError:
            if not sample.dropped:
                raise
            return Part([], [], "abort")
        finally:
            sample.call = None

    async def _complete(self, server: str, sample: RemoteSample) -> Part:
        sample.server, sample.call_id = server, next(self._names)
        version = self.version
        part = await self._dialect.complete(server, sample)
        if self.must_match and part.token_ids:
            in_part = self._dialect.parts_have_version
            written_by = part.weight_version if in_part else await self._version_now(server)
            if written_by != version:
                own = "those it was started with" if written_by is None else f"weights of version {written_by}"
                reason = f"it wrote with {own}, not {version}."
                self._pool.mark_down(server, reason)
                raise ServerGoneError(f"{server} is of no use: {reason}", url=server)
        return part

    async def _version_now(self, server: str) -> int | None:
        """What the server says, asked no earlier than this call; those that come while one asks share the next one."""
        since, asked = time.monotonic(), self._versions[server]
        async with asked.lock:
            if asked.at < since:
                at = time.monotonic()
                asked.version = await self._dialect.weight_version(server)
                asked.at = at
            return asked.version

    async def _end_calls(self, samples: Sequence[RemoteSample]) -> None:
        give_up, answer_s = time.monotonic() + _GIVE_UP_S, _FIRST_ANSWER_S
        while pending := [sample for sample in samples if sample.call is not None]:
            calls = [sample.call for sample in pending if sample.call is not None]
            over = time.monotonic() >= give_up
            for sample, call in zip(pending, calls, strict=True):
                if over or not sample.server:  # one that waits for room has nothing to lose, and must not begin now
                    sample.dropped = True
                    call.cancel()
            if not over:
                await self._ask_to_abort(pending)
            await asyncio.wait(calls, timeout=answer_s)
            answer_s = min(2 * answer_s, _ANSWER_S)
            await asyncio.sleep(0)  # the samples take in what their calls answered

    async def _ask_to_abort(self, samples: Sequence[RemoteSample]) -> None:
        by_server: dict[str, list[str]] = defaultdict(list)
        for sample in samples:
            if sample.server:
                by_server[sample.server].append(sample.call_id)
        # A server that cannot be asked is dead: its calls end without it.
        await ask_each(self._dialect.abort(server, call_ids) for server, call_ids in by_server.items())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
