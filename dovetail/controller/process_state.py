"""The state of processes from the operating system, on any node: running or stopped, and their Python stacks.

Needs no cooperation of the processes, so it works for one that is stopped, or that holds Python's lock in C++ code. The
driver reads the process table of its own machine; on every other node a small actor of its own process does.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.observability.progress import read_progress

if TYPE_CHECKING:
    from dovetail.controller.host import ProcessIdentity


STACK_SIGNAL = signal.SIGUSR2
DRIVEN_BY = "DOVETAIL_DRIVEN_BY"
"""Environment variable of a process that is no child of the worker that drives it, such as an actor: that pid."""
_STACK_S = 2.0
logger = logging.getLogger(__name__)

ANSWER_S = 10.0


@dataclass(frozen=True)
class ProcessState:
    """A line of the process table; ``state`` is a letter: R running, S sleeping, D in the kernel, T stopped, Z dead."""

    pid: int
    parent: int
    state: str
    name: str

    @property
    def is_stopped(self) -> bool:
        """By a signal. One that a debugger holds (t) is not: somebody looks at it on purpose."""
        return self.state == "T"


def stopped_processes(pids: Sequence[int]) -> dict[int, ProcessState]:
    """The stopped process by pid: for those of ``pids`` that are stopped, or that have a stopped process below them.

    A process below another is its child, or says in `DRIVEN_BY` that it belongs to it.
    """
    table = {process.pid: process for process in process_table()}
    stopped: dict[int, ProcessState] = {}
    for process in table.values():
        if process.is_stopped:
            ancestor: ProcessState | None = process
            passed: set[int] = set()
            while ancestor is not None and ancestor.pid not in passed:
                passed.add(ancestor.pid)
                if ancestor.pid in pids and ancestor.pid not in stopped:
                    stopped[ancestor.pid] = process
                ancestor = table.get(_driver_of(ancestor.pid) or ancestor.parent)
    return {pid: table[pid] if table[pid].is_stopped else stopped[pid] for pid in stopped}


def _driver_of(pid: int) -> int | None:
    with suppress(OSError):  # it has ended meanwhile, or this is no Linux
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(f"{DRIVEN_BY}=".encode()):
                driver = int(variable.partition(b"=")[2])
                return None if driver == pid else driver
    return None


def process_table() -> list[ProcessState]:
    """Every process of this machine."""
    if sys.platform != "linux":
        return _table_of_ps()
    table = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                table.append(_parse_stat(Path(entry.path, "stat").read_text(errors="replace")))
    return table


def _parse_stat(text: str) -> ProcessState:
    pid, _, rest = text.partition(" (")
    name, _, fields = rest.rpartition(") ")  # a name may hold brackets and spaces
    state, parent, *_ = fields.split()
    return ProcessState(int(pid), int(parent), state, name)


def _table_of_ps() -> list[ProcessState]:
    lines = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,stat=,comm="], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    rows = [line.split(None, 3) for line in lines.splitlines()]
    return [ProcessState(int(pid), int(parent), state[0], name) for pid, parent, state, name in rows]


def kill_processes(pids: Sequence[int]) -> None:
    """SIGKILL, which also ends a stopped process. Those that are gone already are fine."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def offer_stacks() -> int | None:
    """In a worker: write the stacks of all threads on `STACK_SIGNAL`; returns the file to read them from (Linux).

    `faulthandler` writes from the signal handler itself: no Python code of this process has to run.
    """
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("dovetail-stacks")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    return file


def read_stacks(pid: int, file: int | None) -> str:
    """Ask a process of this machine that has called `offer_stacks` where it is; empty when it cannot be asked."""
    if file is None:
        return ""
    path = Path(f"/proc/{pid}/fd/{file}")
    try:
        before = path.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_S
        size = before
        while time.monotonic() < end:
            time.sleep(0.05)
            now = path.stat().st_size
            if now == size > before:  # it has stopped growing
                break
            size = now
        return path.read_bytes()[before:].decode(errors="replace")
    except OSError:
        return ""


class NodeMonitor:
    """Answers for the processes of one node. A Ray actor on other nodes, a plain object on the driver's."""

    def stopped(self, pids: Sequence[int]) -> dict[int, ProcessState]:
        return stopped_processes(pids)

    def stacks(self, files: Mapping[int, int | None]) -> dict[int, str]:
        return {pid: read_stacks(pid, file) for pid, file in files.items()}

    def progress(self, files: Mapping[int, int | None]) -> dict[int, int]:
        return {pid: read_progress(pid, file) for pid, file in files.items()}

    def kill(self, pids: Sequence[int]) -> None:
        kill_processes(pids)


class Monitors:
    """One monitor for each node that has workers. Asks all nodes at once; one that does not answer is left out."""

    def __init__(self) -> None:
        self._actors: dict[tuple[str, str], Any] = {}  # by job and node: actors end with the job that started them
        self._silent: set[str] = set()  # nodes that a warning was written about

    def ask(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`method` of the monitors of these nodes, each with its own argument; answers by node id."""
        import ray
        from ray.exceptions import RayError

        context = ray.get_runtime_context()
        here, job = context.get_node_id(), context.get_job_id()
        others = {node: value for node, value in arguments.items() if node != here}
        waiting = {node: getattr(self._actor(job, node), method).remote(value) for node, value in others.items()}
        answers = {here: getattr(NodeMonitor(), method)(arguments[here])} if here in arguments else {}
        ready, late = (
            ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=ANSWER_S) if waiting else ([], [])
        )
        for node, reference in waiting.items():
            if reference in late:
                self._warn_once(
                    node, f"has not answered for {ANSWER_S:.0f} s; its processes are not looked at until it does."
                )
            elif reference in ready:
                try:
                    answers[node] = ray.get(reference, timeout=ANSWER_S)
                    self._silent.discard(node)
                except RayError as error:  # the node is gone: the deaths of its workers are noticed without it
                    self._warn_once(node, f"is gone: {error}")
                    self._actors.pop((job, node), None)
        return answers

    def _warn_once(self, node_id: str, what: str) -> None:
        import ray

        if node_id not in self._silent:
            self._silent.add(node_id)
            address = next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)
            logger.warning("the monitor of node %s %s", address, what)

    def stopped(self, identities: Sequence[ProcessIdentity]) -> dict[ProcessIdentity, ProcessState]:
        """By worker, because pids of two nodes may be equal: itself, or the child of it that is stopped."""
        answers = self.ask("stopped", _pids_by_node(identities))
        return {
            identity: answers[identity.node_id][identity.pid]
            for identity in identities
            if identity.pid in answers.get(identity.node_id, {})
        }

    def stacks(self, identities: Sequence[ProcessIdentity]) -> list[str]:
        """Where the Python code of each process is, in the order given; empty where it cannot be asked."""
        answers = self.ask("stacks", _files_by_node(identities, "stack_file"))
        return [answers.get(identity.node_id, {}).get(identity.pid, "") for identity in identities]

    def progress(self, identities: Sequence[ProcessIdentity]) -> int:
        """The counts of these processes together; where they cannot be read nothing is added."""
        answers = self.ask("progress", _files_by_node(identities, "progress_file"))
        return sum(sum(counts.values()) for counts in answers.values())

    def kill(self, identities: Sequence[ProcessIdentity]) -> None:
        """SIGKILL: Ray asks a worker to end itself, which a stopped one cannot."""
        self.ask("kill", _pids_by_node(identities))

    def _actor(self, job: str, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if (job, node_id) not in self._actors:
            self._actors[job, node_id] = (
                ray.remote(NodeMonitor)
                .options(
                    num_cpus=0,
                    name=f"monitor-{node_id[:8]}-{os.getpid()}",
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                .remote()
            )
        return self._actors[job, node_id]


def _files_by_node(
    identities: Sequence[ProcessIdentity], kind: Literal["stack_file", "progress_file"]
) -> dict[str, dict[int, int | None]]:
    nodes: dict[str, dict[int, int | None]] = defaultdict(dict)
    for identity in identities:
        nodes[identity.node_id][identity.pid] = getattr(identity, kind)
    return nodes


def _pids_by_node(identities: Sequence[ProcessIdentity]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = defaultdict(list)
    for identity in identities:
        nodes[identity.node_id].append(identity.pid)
    return nodes
