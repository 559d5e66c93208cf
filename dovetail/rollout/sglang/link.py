"""What the engine asks of one SGLang instance, wherever it runs. Routes and fields are those of SGLang's server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar

from dovetail.rollout.base import EngineDiedError, EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RefusedError(EngineError):
    """SGLang is alive and did not do what it was asked."""


class SGLangLink(Protocol):
    """One instance. Its coroutines belong to one event loop."""

    name: str
    death: str
    """Why SGLang is gone; empty while it lives."""

    async def start(self) -> None:
        """Returns when SGLang is ready for requests; EngineError with its reason if it does not get there."""
        ...

    async def call(self, route: str, body: Mapping[str, Any]) -> Any:
        """`route` is a path such as "/generate". The decoded answer; RefusedError, or EngineDiedError."""
        ...

    async def close(self) -> None:
        """End its processes, and no others. A second call does nothing."""
        ...


class Watch:
    """Notices that processes are gone, so that nobody waits for their answer. `look` says why, or nothing."""

    def __init__(self, look: Any, interval_s: float = 0.25) -> None:
        self._look = look
        self._interval_s = interval_s
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watching())

    async def unless_dead(self, work: Awaitable[T]) -> T:
        """The result of `work`, or EngineDiedError as soon as there is nobody left to work."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._died}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done() and not task.cancelled():
            return task.result()
        raise EngineDiedError(self._died.result())

    def close(self) -> None:
        self._task.cancel()

    async def _watching(self) -> None:
        try:
            while not (reason := self._look()):
                await asyncio.sleep(self._interval_s)
        except Exception as error:  # nobody would notice a death from here on: the same as one
            reason = f"SGLang can no longer be watched: {error!r}"
            logger.exception(reason)
        self._died.set_result(reason)
