"""An event loop on a thread of its own, for callers that block and have much to wait for at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from dovetail.observability.stalls import StalledError
from dovetail.observability.waits import Wait, waiting
from dovetail.rollout.base import CLOSED, EngineError

T = TypeVar("T")

LONG_CALL_S = 7200.0
"""One generation may take this long; longer ones are named in the log."""
_BLOCKED_S, _TICK_S = 60.0, 5.0
"""A function that does not give way for this long stops all others, deadlines too: its stack is in the log."""
_NUM_FRAMES = 4


class LoopThread:
    """`run` a coroutine from any other thread and wait for it. After `close` the engine is closed: EngineError."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ticked_at = time.monotonic()
        self.is_stalled = False
        """`refuse_blocked` has raised: what is started now may never run."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Its result, or its exception. A wait that is interrupted (Ctrl-C), or too long, cancels it."""
        future = self.start(coroutine)
        try:
            with waiting("the engine's caller", getattr(coroutine, "__qualname__", "a call"), limit_s=LONG_CALL_S):
                return future.result(timeout_s)
        except BaseException as error:
            future.cancel()
            if timeout_s is not None and isinstance(error, TimeoutError):
                self.refuse_blocked(timeout_s)
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if not self._thread.is_alive():
            coroutine.close()
            raise EngineError(CLOSED)
        assert threading.current_thread() is not self._thread, "the loop would wait for itself"
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def refuse_blocked(self, limit_s: float) -> None:
        """Raise `StalledError`, with the frames of the function, where one has kept all others waiting for so long."""
        blocked_s = time.monotonic() - self._ticked_at
        frame = sys._current_frames().get(self._thread.ident or 0)
        if blocked_s < max(limit_s, 2 * _TICK_S) or frame is None:
            return
        self.is_stalled = True
        raise StalledError(
            f"no progress for {blocked_s:.0f} s: the event loop {self._thread.name} is blocked by a function that does "
            "not await. Write it without async, and it has a thread and a deadline of its own; or await what it waits "
            f"for. It is here:\n{''.join(traceback.format_stack(frame)[-_NUM_FRAMES:]).rstrip()}"
        )

    def close(self) -> None:
        """Cancel what is left and end the thread. A second call does nothing."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            with waiting("the engine", f"thread {self._thread.name} to end", limit_s=60.0):
                self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        what = "a function that blocks it (an async one must await; a plain one has a thread of its own)"
        try:
            with waiting(f"the event loop {self._thread.name}", what, limit_s=_BLOCKED_S) as blocked:
                self._tick(blocked)
                self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.close()

    def _tick(self, blocked: Wait) -> None:
        blocked.restart()
        self._ticked_at = time.monotonic()
        self.loop.call_later(_TICK_S, self._tick, blocked)
