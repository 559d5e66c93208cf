"""The state of processes on this machine, from the operating system: running or stopped, and their Python stacks.

Needs no cooperation of the processes, so it works for one that is stopped, or that holds Python's lock in C++ code.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR2
DRIVEN_BY = "DOVETAIL_DRIVEN_BY"
"""Environment variable of a process that is no child of the worker that drives it, such as an actor: that pid."""
_STACK_S = 2.0


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
