"""Several servers as one: requests go where the router sends them, and move on when their server dies.

A request that a server did not finish is sent again, to another one; its answer is taken from exactly one. A server is
down when its connections break, when it says itself that it is unwell, or when it has been silent for `silence_s`. It
is asked every `interval_s` whether it is back, and `admit` decides whether it may serve. Knows no engine's routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dovetail.rollout.remote.client import HttpClient, ServerError, ServerGoneError, ServerTimeoutError
from dovetail.rollout.remote.router import Lease, Router

logger = logging.getLogger(__name__)

T = TypeVar("T")
Admit = Callable[[str], Awaitable[None]]
"""Called with a server that is back; raises ServerError to keep it out."""

INTERVAL_S = 2.0
SILENCE_S = 30.0
CHECK_TIMEOUT_S = 5.0
MAX_IN_FLIGHT = 1024
_MAX_BREAKS = 5
_MAX_STRIKES = 2


class ServerPool:
    """All methods belong to one event loop. `start` begins watching, `close` ends it."""

    def __init__(
        self,
        urls: list[str],
        client: HttpClient,
        *,
        health_path: str = "/health",
        admit: Admit | None = None,
        interval_s: float = INTERVAL_S,
        silence_s: float = SILENCE_S,
        check_timeout_s: float = CHECK_TIMEOUT_S,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self.router = Router(url.rstrip("/") for url in urls)
        self.client = client
        self._health_path = health_path
        self._admit = admit
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._check_timeout_s = check_timeout_s
        self._room = asyncio.Semaphore(max_in_flight)
        self._calls: dict[str, set[asyncio.Task]] = {server: set() for server in self.router.servers}
        self._heard: dict[str, float] = dict.fromkeys(self.router.servers, time.monotonic())
        self._watch: asyncio.Task | None = None

    def start(self) -> None:
        if self._watch is None:
            self._watch = asyncio.create_task(self._watching())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None

    async def run(self, call: Callable[[str], Awaitable[T]], *, key: str | None = None) -> T:
        """`await call(server)` on the server of `key`; on another one if that dies meanwhile.

        `call` must be harmless when repeated. Its other errors (a refusal, a 500 of a healthy server) are raised.
        Raises NoServerError when no server is left.
        """
        breaks = 0
        async with self._room:
            while True:
                with self.router.acquire(key) as lease:
                    try:
                        return await self._on(lease, call)
                    except ServerError as error:
                        if lease.lost:
                            continue  # whoever noticed first has said so
                        if not await self._is_gone(lease, error):
                            breaks += 1
                            if not isinstance(error, ServerGoneError) or breaks >= _MAX_BREAKS:
                                raise
                            logger.warning("%s The server is healthy: once more.", error)

    def mark_down(self, server: str, reason: str) -> None:
        """Take the server out; what runs on it moves on."""
        if server in self.router.down():
            return
        lost = self.router.mark_down(server, reason)
        left = len(self.router.up())
        logger.warning("server %s is down: %s %d requests move on; %d servers left.", server, reason, len(lost), left)
        for task in self._calls[server]:
            task.cancel()

    async def health_problem(self, server: str) -> ServerError | None:
        """What a health check says; None is good."""
        try:
            await self.client.get(server + self._health_path, timeout_s=self._check_timeout_s)
        except ServerError as error:
            return error
        self._heard[server] = time.monotonic()
        return None

    async def _on(self, lease: Lease, call: Callable[[str], Awaitable[T]]) -> T:
        """One call, which `mark_down` can end: the connection to a machine that vanished never breaks by itself."""
        task = asyncio.ensure_future(call(lease.server))
        self._calls[lease.server].add(task)
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and lease.lost:
                raise ServerGoneError(f"{lease.server} went down.", url=lease.server) from None
            task.cancel()
            raise
        finally:
            self._calls[lease.server].discard(task)
        self._heard[lease.server] = time.monotonic()
        return answer

    async def _is_gone(self, lease: Lease, error: ServerError) -> bool:
        """After a failed call: whether the server is down (and marked so), or only refused."""
        if isinstance(error, ServerTimeoutError) or (error.status and error.status < 500):
            return False
        problem = await self.health_problem(lease.server)
        if problem is not None:
            self.mark_down(lease.server, str(error))
        return lease.lost

    async def _watching(self) -> None:
        strikes = dict.fromkeys(self.router.servers, 0)
        while True:
            await asyncio.sleep(self._interval_s)
            looks = (self._look_at(server, strikes) for server in self.router.servers)
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                # The task must not die unseen: nobody would notice dead servers from then on.
                if isinstance(outcome, Exception):
                    logger.error("a look at the servers failed, the next comes soon", exc_info=outcome)

    async def _look_at(self, server: str, strikes: dict[str, int]) -> None:
        problem = await self.health_problem(server)
        if server in self.router.down():
            strikes[server] = 0
            if problem is None:
                await self._try_to_admit(server)
            return
        # A busy server may be slow to answer; one that cannot be reached, or says it is dead, need not be waited for.
        strikes[server] = 0 if problem is None or isinstance(problem, ServerTimeoutError) else strikes[server] + 1
        silent_s = time.monotonic() - self._heard[server]
        if problem is not None and (strikes[server] >= _MAX_STRIKES or silent_s > self._silence_s):
            self.mark_down(server, f"it fails its health checks ({problem}).")

    async def _try_to_admit(self, server: str) -> None:
        try:
            if self._admit is not None:
                await self._admit(server)
        except ServerError as error:
            logger.warning("server %s is back but may not serve yet: %s", server, error)
            return
        self.router.mark_up(server)
        logger.info("server %s is back.", server)
