"""Every wait has a limit and a description: who waits for what, since when. One mechanism for the project.

    with waiting("the driver", "actor.update_actor on ranks [1]", limit_s=600) as wait:
        result = queue.get(timeout=wait.left())    # a wait that takes a timeout ends by itself ...
        wait.check()                               # ... or the loop around it asks: WaitTimeout names both sides

A wait that takes no timeout (a collective, somebody else's library) is only entered: one thread per process looks at
the open waits and logs each one that is past its limit, with the Python stack of the thread that waits. It ends none,
but calls `on_hang` of a wait that has lasted `hung_s`. Time at a breakpoint, and time in which the process is stopped
(Ctrl-Z), do not count.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often open waits are looked at: a wait is named at most this long after its limit."""
_STOPPED_S = 5.0
"""A process that looks so much later than it meant to was stopped, not busy."""
_DEBUGGERS = ("bdb", "pydevd")
"""Modules in the stack of a thread that stands at a breakpoint."""


class WaitTimeout(TimeoutError):
    """A wait reached its limit. The message says who waited for what, since when."""


@dataclass(eq=False)
class Wait:
    """One wait under way. Times are in seconds."""

    who: str
    what: str
    limit_s: float
    hung_s: float = math.inf
    on_hang: Callable[[Wait, str], None] | None = None
    """Called once, by the thread that looks, with the stack of the thread that waits. It must not raise."""
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.time)
    _named_at: float = field(default=0.0, init=False)

    def waited(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float:
        """Time until the limit, never negative: for calls that take a timeout."""
        return max(0.0, self.limit_s - self.waited())

    def is_over(self) -> bool:
        return self.waited() >= self.limit_s

    def restart(self, waited_s: float = 0.0) -> None:
        """There was progress: the limit counts from now, or from `waited_s` seconds ago."""
        self.began, self.since, self._named_at = time.monotonic() - waited_s, time.time() - waited_s, 0.0

    def check(self, detail: str = "") -> None:
        """Raise `WaitTimeout` when the limit has passed."""
        if self.is_over():
            raise self.error(detail)

    def error(self, detail: str = "") -> WaitTimeout:
        return WaitTimeout(f"{self}{f': {detail}' if detail else ''}")

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.who} waits for {self.what} since {since} ({self.waited():.0f} s; limit {self.limit_s:.0f} s)"


@contextmanager
def waiting(
    who: str, what: str, *, limit_s: float, hung_s: float = math.inf, on_hang: Callable[[Wait, str], None] | None = None
) -> Iterator[Wait]:
    """Announce a wait for as long as the block lasts."""
    wait = Wait(who, what, limit_s, hung_s, on_hang)
    _REGISTER.add(wait)
    try:
        yield wait
    finally:
        _REGISTER.remove(wait)


class _Register:
    """The open waits of this process, and the thread that looks at them. The thread starts with the first wait."""

    def __init__(self) -> None:
        self._open: set[Wait] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, wait: Wait) -> None:
        with self._lock:
            self._open.add(wait)
            if self._thread is None or not self._thread.is_alive():  # a forked process has none
                self._thread = threading.Thread(target=self._look_again_and_again, name="dovetail-waits", daemon=True)
                self._thread.start()

    def remove(self, wait: Wait) -> None:
        with self._lock:
            self._open.discard(wait)

    def look(self) -> list[Wait]:
        """Log the waits that are past their limit: once, and again each time they have become twice as long."""
        with self._lock:
            for wait in self._open:
                if wait.waited() >= min(wait.limit_s, wait.hung_s) and _is_debugged(wait.thread):
                    wait.restart()
            named = [wait for wait in self._open if wait.is_over() and wait.waited() >= 2 * wait._named_at]
            hung = [wait for wait in self._open if wait.on_hang is not None and wait.waited() >= wait.hung_s]
        for wait in named:
            wait._named_at = wait.waited()
            logger.error("%s; it waits here:\n%s", wait, _stack_of(wait.thread))
        for wait in hung:
            on_hang, wait.on_hang = wait.on_hang, None
            if on_hang is not None:
                on_hang(wait, _stack_of(wait.thread))
        return named

    def skip(self, seconds: float) -> None:
        """This process did not run for so long."""
        with self._lock:
            for wait in self._open:
                wait.began += seconds

    def _look_again_and_again(self) -> None:
        pause = threading.Event()
        looked = time.monotonic()
        while not pause.wait(LOOK_S):
            late = time.monotonic() - looked - LOOK_S
            looked = time.monotonic()
            if late > _STOPPED_S:
                self.skip(late)
            self.look()


def _is_debugged(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(the thread has ended)"


_REGISTER = _Register()
