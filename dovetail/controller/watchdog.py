"""Notices processes that die, also between calls and in groups nobody waits for. One thread for all groups of a driver.

It asks the cluster for the names of living actors once a second. A death stops its group at once and is logged; the
next wait on any group raises it, once. Calls on the dead group raise it always.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

from dovetail.controller.errors import WorkerError

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class Watched(Protocol):
    """Processes as the watchdog sees them: `WorkerProcesses` is one."""

    watchdog: Watchdog | None
    names: list[str]
    stopped: bool
    failure: WorkerError | None

    def report_death(self, rank: int, reason: str) -> WorkerError: ...


class Watchdog:
    """Watches the processes given to `watch` until they are stopped."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._unreported: list[WorkerError] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, processes: Watched) -> None:
        """Start watching; the processes must be up."""
        processes.watchdog = self
        with self._lock:
            self._watched.add(processes)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="dovetail-watchdog", daemon=True)
                self._thread.start()

    def forget(self, processes: Watched) -> None:
        """Stop watching: they are about to end."""
        with self._lock:
            self._watched.discard(processes)

    def look(self) -> None:
        """Compare the watched processes with the living ones, now."""
        from ray.util import list_named_actors

        with self._lock:
            watched = list(self._watched)
        if not watched:
            return
        living = set(list_named_actors())
        for processes in watched:
            for rank, name in enumerate(processes.names):
                if name not in living and not processes.stopped and processes.failure is None:
                    error = processes.report_death(rank, "Its process is gone (killed, crashed or out of memory).")
                    with self._lock:
                        # A call may have met the death itself in the meantime, and raised it.
                        if not error.was_raised:
                            self._unreported.append(error)

    def take_unreported(self) -> WorkerError | None:
        """A death that no call has raised yet; it counts as raised from now on."""
        with self._lock:
            error = self._unreported.pop(0) if self._unreported else None
            if error is not None:
                error.was_raised = True
            return error

    def mark_reported(self, error: WorkerError) -> None:
        """A call raises this error itself."""
        with self._lock:
            error.was_raised = True
            self._unreported = [other for other in self._unreported if other is not error]

    def _run(self) -> None:
        import ray
        from ray.exceptions import RayError

        pause = threading.Event()
        while not pause.wait(PERIOD_S):
            with self._lock:
                if not self._watched or not ray.is_initialized():
                    self._thread = None
                    return
            try:
                self.look()
            except (RayError, ConnectionError) as error:
                if ray.is_initialized():
                    logger.warning("could not list the living workers: %s", error)


WATCHDOG = Watchdog()
