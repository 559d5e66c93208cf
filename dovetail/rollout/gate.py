"""Let several threads share one stepping loop. Knows nothing of what a step does.

Whoever waits for results drives the steps; the others sleep until their results are there or the driver has left.
Control work (`between_steps`) waits for the step in flight and keeps the next one from starting. Work that nobody waits
for (`beside_step`) is left to the thread that steps: handing the steps to and fro costs two thread switches, and each
of them up to Python's switch interval while other threads run Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dovetail.observability.waits import waiting

_LONG_STEP_S = 600.0
"""The first steps of an engine may compile."""


class StepGate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stepping = False
        self._num_controls = 0
        self._paused = False
        self._posted: list[Callable[[], None]] = []  # runs before the next step

    @property
    def paused(self) -> bool:
        return self._paused

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Run the body while no step runs. Does not nest."""
        with self._changed:
            self._num_controls += 1
            try:
                if self._stepping:
                    with waiting("a control of the engine", "the step in flight to end", limit_s=_LONG_STEP_S):
                        self._changed.wait_for(lambda: not self._stepping)
                yield
            finally:
                self._num_controls -= 1
                self._changed.notify_all()

    @contextmanager
    def beside_step(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Run the body beside a step, but no control. What it posts, which must not raise, runs between two steps: at
        once, or when the step in flight has ended."""
        with self._changed:
            yield self._posted.append
            if not self._stepping:
                self._run_posted()
                self._changed.notify_all()

    def pause(self) -> None:
        with self.between_steps():
            self._paused = True

    def continue_(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def drive(self, step: Callable[[], bool], finished: Callable[[], bool], timeout: float | None = None) -> None:
        """Call `step` until `finished`, or wait while another thread does. `step` says whether any result is new.

        Returns after `timeout` seconds all the same; the step in flight is finished first.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            try:
                while not finished():
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        return
                    if self._stepping or self._paused or self._num_controls:
                        self._changed.wait(left)
                        continue
                    if self._step_unlocked(step) or self._num_controls:
                        self._changed.notify_all()
            finally:
                # Another thread may have to take over the driving.
                self._changed.notify_all()

    def _step_unlocked(self, step: Callable[[], bool]) -> bool:
        self._stepping = True
        self._changed.release()
        try:
            return step()
        finally:
            self._changed.acquire()
            self._stepping = False
            self._run_posted()

    def _run_posted(self) -> None:
        posted, self._posted = self._posted, []
        for work in posted:
            work()
