"""Detects processes that die or are stopped, also between calls and in groups nobody waits for. One thread per driver.

It asks the cluster for the names of living actors once a second, and every node for workers that are stopped (SIGSTOP,
also of an engine's process below a worker). A death ends its group at once, a stop after `STOPPED_S`; both are logged.
The next wait on any group raises it, once, unless the group `dies_alone` or was shut down. Calls on the dead group
raise it always.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from dovetail.controller.errors import WorkerError
from dovetail.controller.process_state import Monitors

if TYPE_CHECKING:
    from dovetail.controller.host import ProcessIdentity
    from dovetail.controller.processes import WorkerProcesses

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
STOPPED_S = 15.0
"""A profiler stops a process for a moment; longer than this is a hang."""
_LOOK_FOR_STOPPED_S = 3.0


class Watchdog:
    """Watches the processes given to `watch` until they are stopped."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()
        self._unreported: list[WorkerError] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.monitors = Monitors()
        self._stopped_since: dict[ProcessIdentity, float] = {}
        self._looked_for_stopped = 0.0

    def watch(self, processes: WorkerProcesses) -> None:
        """Start watching; the processes must be up."""
        processes.watchdog = self
        with self._lock:
            self._watched.add(processes)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="dovetail-watchdog", daemon=True)
                self._thread.start()

    def forget(self, processes: WorkerProcesses) -> None:
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
                    self._note(
                        processes, processes.report_death(rank, _why_gone(processes.identities[rank : rank + 1]))
                    )
        if time.monotonic() - self._looked_for_stopped >= _LOOK_FOR_STOPPED_S:
            self._looked_for_stopped = time.monotonic()
            self._look_for_stopped(watched)

    def _look_for_stopped(self, watched: list[WorkerProcesses]) -> None:
        places = [(processes, rank) for processes in watched for rank in range(len(processes.identities))]
        stopped = self.monitors.stopped([processes.identities[rank] for processes, rank in places])
        now = time.monotonic()
        self._stopped_since = {identity: self._stopped_since.get(identity, now) for identity in stopped}
        for processes, rank in places:
            identity = processes.identities[rank]
            seconds = now - self._stopped_since.get(identity, now)
            if seconds < STOPPED_S or processes.stopped or processes.failure is not None:
                continue
            state = stopped[identity]
            who = "Its process" if state.pid == identity.pid else f"Its child {state.name} (pid {state.pid})"
            reason = f"{who} is stopped (SIGSTOP or a suspended job) for {seconds:.0f} s; `kill -CONT` lets one go on."
            self._note(processes, processes.report_hang(rank, reason))

    def _note(self, processes: WorkerProcesses, error: WorkerError) -> None:
        with self._lock:
            # In the meantime a call may have met the death itself and raised it, or the group was shut down.
            if not (error.was_raised or processes.stopped or processes.dies_alone):
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
            except Exception:  # the thread must not die unseen: nobody would notice deaths any more
                if ray.is_initialized():
                    logger.exception("the watchdog could not look at the workers; it tries again")


def _why_gone(identity: list[ProcessIdentity]) -> str:
    import ray

    lost = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
    if identity and identity[0].node_id in lost:
        return "Ray lost its node: the machine is down, or the network to it, or its raylet was killed."
    return "Its process is gone (killed, crashed or out of memory)."


WATCHDOG = Watchdog()
