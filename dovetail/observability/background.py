"""One background job at a time, so that writing logs and responses does not delay the devices.

A job's error is raised by the next call, in the driver's thread. Keeps no queue: a job that is slower than a step makes
the next one wait, so memory stays that of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dovetail.observability.waits import waiting

_LONG_S = 600.0


class Background:
    """`submit` starts a job when the one before is done; `wait` returns when nothing is under way."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._running: Future[object] | None = None

    def submit(self, job: Callable[[], object]) -> None:
        self.wait()
        self._running = self._pool.submit(job)

    def wait(self) -> None:
        """Raises what the last job raised, once."""
        running, self._running = self._running, None
        if running is not None:
            with waiting("the driver", self._name, limit_s=_LONG_S):
                running.result()

    def close(self) -> None:
        """Finish the job under way; its error is raised after the thread has ended."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=True)
