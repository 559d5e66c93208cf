"""Deadlines of calls. The time in which a call waits for its turn does not count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlineError(Exception):
    """Something took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it took longer than {seconds:g} s")
        self.seconds = seconds


class _Queued:
    """Seconds that a call has waited for its turn."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def end(self) -> None:
        if self._since is not None:
            self._seconds += asyncio.get_running_loop().time() - self._since
            self._since = None

    def take(self) -> float:
        """Those that nobody has taken yet."""
        if self._since is not None:
            self.end()
            self.begin()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


_QUEUED: ContextVar[_Queued | None] = ContextVar("queued", default=None)


@asynccontextmanager
async def place_in(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the places. Until there is one, the deadline of the call stands still."""
    queued = _QUEUED.get() or _Queued()
    queued.begin()
    try:
        await places.acquire()
    finally:
        queued.end()
    try:
        yield
    finally:
        places.release()


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result; `DeadlineError` after so many seconds, also where the work does not let itself be cancelled."""
    queued = _Queued()
    token = _QUEUED.set(queued)
    task = asyncio.ensure_future(work)  # in a copy of the context
    _QUEUED.reset(token)
    left = seconds
    try:
        while left > 0:
            done, _ = await asyncio.wait({task}, timeout=left)
            left = 0.0 if done else queued.take()
    finally:
        task.cancel()
    if not task.done():
        raise DeadlineError(seconds)
    return result_of(task)


def result_of(task: asyncio.Future[T]) -> T:
    """Of a task that has ended. A CancelledError of its own code would end whoever waits for it, unseen by all."""
    if task.cancelled():
        raise RuntimeError("its own code cancelled it")
    return task.result()
