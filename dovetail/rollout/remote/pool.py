"""Several servers as one: a request goes to the server that has served its key before, else to the one with the least
to do, and moves on when its server dies.

Sticky, because a server that has seen a conversation or a group's prompt holds it in its prefix cache. A request that a
server did not finish is sent again, to another one; its answer is taken from exactly one. A server is down when its
connections break, when it says itself that it is unwell, when it has been silent for `silence_s`, or when it has calls
and has generated nothing for `STALL_S`. It is asked every `interval_s` whether it is back, and `admit` decides whether
it may serve. Knows no engine's routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from dovetail.observability.progress import note_progress
from dovetail.rollout.base import STALL_S, EngineError
from dovetail.rollout.remote.client import HttpClient, ServerError, ServerGoneError, ServerTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Admit = Callable[[str], Awaitable[None]]
"""Called with a server that is back; raises ServerError to keep it out."""

INTERVAL_S = 2.0
SILENCE_S = 30.0
CHECK_TIMEOUT_S = 5.0
MAX_IN_FLIGHT = 1024
MAX_STICKY_KEYS = 65536
"""Keys not seen for so many others are forgotten."""
_MAX_BREAKS = 5
_MAX_STRIKES = 2


class NoServerError(EngineError):
    """No server is up. The message names each one and why it is down."""


class ServerPool:
    """`run` and what it awaits belong to one event loop; `up` and `down` may be asked from any thread. `start` begins
    watching, `close` ends it.

    A key stays with its server for as long as that is up, also when it has more to do than others; a key whose server
    left moves, and does not move back when it returns.
    """

    def __init__(
        self,
        urls: Sequence[str],
        client: HttpClient,
        *,
        health_path: str = "/health",
        admit: Admit | None = None,
        num_tokens: Callable[[str], Awaitable[int]] | None = None,
        interval_s: float = INTERVAL_S,
        silence_s: float = SILENCE_S,
        check_timeout_s: float = CHECK_TIMEOUT_S,
    ) -> None:
        self.servers = tuple(url.rstrip("/") for url in urls)
        """All of them, up or down, in the order they were given."""
        if not self.servers:
            raise ValueError("rollout.server_urls is empty; name at least one server.")
        for server in self.servers:
            if self.servers.count(server) > 1:
                raise ValueError(f"server {server!r} is given twice; name each once in rollout.server_urls.")
        self.client = client
        self._health_path = health_path
        self._admit = admit
        self._num_tokens = num_tokens
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._check_timeout_s = check_timeout_s
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._calls: dict[str, set[asyncio.Future[Any]]] = {server: set() for server in self.servers}
        self._down: dict[str, str] = {}
        self.num_failures = 0
        """How often a server has gone down."""
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._heard: dict[str, float] = dict.fromkeys(self.servers, time.monotonic())
        self._progress_at = dict(self._heard)
        self._counts: dict[str, int] = {}
        self._stalled: set[str] = set()  # down for that reason
        self._strikes = dict.fromkeys(self.servers, 0)
        self._watches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if not self._watches:
            self._watches = [asyncio.create_task(self._watching(server)) for server in self.servers]

    async def close(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def up(self) -> tuple[str, ...]:
        return tuple(server for server in self.servers if server not in self._down)

    def down(self) -> dict[str, str]:
        """Why each server that is down is down."""
        return dict(self._down)

    async def run(self, call: Callable[[str], Awaitable[T]], *, key: str | None = None) -> T:
        """`await call(server)` on the server of `key`; on another one if that dies meanwhile.

        `call` must be harmless when repeated. Its other errors (a refusal, a 500 of a healthy server) are raised.
        Raises NoServerError when no server is left.
        """
        breaks = 0
        async with self._room:
            while True:
                server = self._choose(key)
                task = asyncio.ensure_future(call(server))
                self._calls[server].add(task)
                try:
                    return await self._answer(server, task)
                except ServerError as error:
                    if self._is_lost(server, task):
                        continue  # whoever noticed first has said so
                    if not await self._is_gone(server, task, error):
                        breaks += 1
                        if not isinstance(error, ServerGoneError) or breaks >= _MAX_BREAKS:
                            raise
                        logger.warning("%s The server is healthy: once more.", error)
                finally:
                    self._calls[server].discard(task)

    def mark_down(self, server: str, reason: str) -> None:
        """Take the server out; what runs on it moves on."""
        if server in self._down:
            return
        self._down[server] = reason
        self.num_failures += 1
        lost, self._calls[server] = self._calls[server], set()
        left = len(self.up())
        logger.warning("server %s is down: %s %d requests move on; %d servers left.", server, reason, len(lost), left)
        for task in lost:
            task.cancel()

    def mark_up(self, server: str) -> None:
        """The server takes requests again."""
        self._down.pop(server, None)
        self._stalled.discard(server)
        self._progress_at[server] = time.monotonic()

    def forget_stall(self, server: str) -> None:
        """The server is a new process, and down until it is marked up."""
        self._stalled.discard(server)
        self._counts.pop(server, None)

    async def hangs(self, server: str, *, silence_s: float = 0.0) -> bool:
        """Whether it answers no health check, or those alone; one that is silent may be busy for `silence_s`. One that
        is down for want of weights does not hang."""
        if server in self._stalled:
            return True
        problem = await self.health_problem(server)
        may_be_busy = isinstance(problem, ServerTimeoutError) and time.monotonic() - self._heard[server] <= silence_s
        return problem is not None and not may_be_busy

    async def health_problem(self, server: str) -> ServerError | None:
        """What a health check says; None is good."""
        try:
            await self.client.get(server + self._health_path, timeout_s=self._check_timeout_s)
        except ServerError as error:
            return error
        self._heard[server] = time.monotonic()
        return None

    def _choose(self, key: str | None) -> str:
        up = self.up()
        if not up:
            reasons = "; ".join(f"{server}: {reason}" for server, reason in self._down.items())
            raise NoServerError(f"none of {len(self.servers)} servers is up ({reasons}).")
        server = None if key is None else self._sticky.get(key)
        if server is None or server not in up:
            # Equal loads are split by a hash of key and server, so that several pools over the same servers do not all
            # begin with the first.
            server = min(up, key=lambda name: (len(self._calls[name]), _hash(key, name)))
        if key is not None:
            self._sticky[key] = server
            self._sticky.move_to_end(key)
            if len(self._sticky) > MAX_STICKY_KEYS:
                self._sticky.popitem(last=False)
        return server

    async def _answer(self, server: str, task: asyncio.Future[T]) -> T:
        """Of one call, which `mark_down` can end: the connection to a machine that vanished never breaks by itself."""
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_lost(server, task):
                raise ServerGoneError(f"{server} went down.", url=server) from None
            task.cancel()
            raise
        self._heard[server] = self._progress_at[server] = time.monotonic()
        return answer

    def _is_lost(self, server: str, task: asyncio.Future[Any]) -> bool:
        """Whether the server went down while this call ran on it, back or not."""
        return task not in self._calls[server]

    async def _is_gone(self, server: str, task: asyncio.Future[Any], error: ServerError) -> bool:
        """After a failed call: whether the server is down (and marked so), or only refused."""
        if isinstance(error, ServerTimeoutError) or (error.status and error.status < 500):
            return False
        problem = await self.health_problem(server)
        if problem is not None:
            self.mark_down(server, str(error))
        return self._is_lost(server, task)

    async def _watching(self, server: str) -> None:
        """A task for each server: one that is back may load weights for long before it is admitted."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._look_at(server)
            except Exception:  # The task must not die unseen: nobody would notice a dead server from then on.
                logger.exception("a look at server %s failed, the next comes soon", server)

    async def _look_at(self, server: str) -> None:
        strikes = self._strikes
        problem = await self.health_problem(server)
        if server in self._down:
            strikes[server] = 0
            if problem is not None or (server in self._stalled and await self._has_progress(server)):
                self._stalled.discard(server)
            if problem is None and server not in self._stalled:
                await self._try_to_admit(server)
            return
        # A busy server may be slow to answer; one that cannot be reached, or says it is dead, need not be waited for.
        strikes[server] = 0 if problem is None or isinstance(problem, ServerTimeoutError) else strikes[server] + 1
        silent_s = time.monotonic() - self._heard[server]
        if problem is not None and (strikes[server] >= _MAX_STRIKES or silent_s > self._silence_s):
            self.mark_down(server, f"it fails its health checks ({problem}).")
        elif problem is None and await self._stalls(server):
            self._stalled.add(server)
            self.mark_down(server, f"it answers its health checks and has generated no token for {STALL_S:g} s.")

    async def _stalls(self, server: str) -> bool:
        """Whether it has had calls for `STALL_S` and made no progress. Asked for its count only after a tenth of it."""
        idle = not self._calls[server] or self._num_tokens is None
        is_due = time.monotonic() - self._progress_at[server] > STALL_S / 10
        if idle or (is_due and await self._has_progress(server)):
            self._progress_at[server] = time.monotonic()
        return time.monotonic() - self._progress_at[server] > STALL_S

    async def _has_progress(self, server: str) -> bool:
        """Whether its count of tokens is another than when it was last asked. One that tells none is trusted."""
        assert self._num_tokens is not None, "only called with it"
        try:
            count = await self._num_tokens(server)
        except ServerError as error:
            return not isinstance(error, ServerTimeoutError)
        before, self._counts[server] = self._counts.get(server), count
        if count != before:
            note_progress()
        return count != before

    async def _try_to_admit(self, server: str) -> None:
        try:
            if self._admit is not None:
                await self._admit(server)
        except ServerError as error:
            logger.warning("server %s is back but may not serve yet: %s", server, error)
            return
        self.mark_up(server)
        logger.info("server %s is back.", server)


def _hash(key: str | None, server: str) -> bytes:
    return hashlib.blake2b(f"{key}\x1f{server}".encode(), digest_size=8).digest()
