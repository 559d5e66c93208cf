"""Deadlines of trajectories and of calls. The time in which one is held, as while a call waits for its turn, does not
count."""

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


class Deadline:
    """A limit that can be held. `passed` is set when it is over."""

    def __init__(self, seconds: float, *, held: bool = False) -> None:
        self.seconds = seconds
        self.passed = asyncio.Event()
        self._held = held
        self._started = False
        self._left = seconds
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The work begins; its time runs unless it is held."""
        self._started = True
        if not self._held:
            self.go()

    def go(self) -> None:
        """Let the time run."""
        self._held = False
        if self._started and self._timer is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._timer = loop.call_later(self._left, self.passed.set)

    def hold(self) -> None:
        """Stop the time."""
        self._held = True
        if self._timer is not None and self._since is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(0.0, self._left - (asyncio.get_running_loop().time() - self._since))


_OF_CALL: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def place_in(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the places. Until there is one, the deadline of the call stands still."""
    deadline = _OF_CALL.get()
    if deadline is not None:
        deadline.hold()
    try:
        await places.acquire()
    finally:
        if deadline is not None:
            deadline.go()
    try:
        yield
    finally:
        places.release()


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of a call; `DeadlineError` after so many seconds."""
    deadline = Deadline(seconds)
    token = _OF_CALL.set(deadline)
    task = asyncio.ensure_future(work)  # in a copy of the context
    _OF_CALL.reset(token)
    try:
        return await until(deadline, task)
    finally:
        deadline.hold()


async def until(deadline: Deadline, task: asyncio.Future[T]) -> T:
    """The result, from when the deadline starts; `DeadlineError` once it has passed, also where the task does not let
    itself be cancelled."""
    passed = asyncio.ensure_future(deadline.passed.wait())
    deadline.start()
    try:
        # The deadline is the limit: one that is held while others work passes in the end.
        await asyncio.wait({task, passed}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DeadlineError(deadline.seconds)
        if task.cancelled():  # by its own code: a CancelledError would end whoever waits for it, unseen by all
            raise RuntimeError("its own code cancelled it")
        return task.result()
    finally:
        task.cancel()
        passed.cancel()
