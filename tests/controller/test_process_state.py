"""Processes from outside: stopped ones are found, busy and debugged ones not; a killed driver leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.controller import watchdog as watchdog_module
from dovetail.controller.hangs import CallLimits, find_hung_rank, is_collective_timeout, waits_in_collective
from dovetail.controller.host import ProcessIdentity
from dovetail.controller.process_state import (
    DRIVEN_BY,
    Monitors,
    ProcessState,
    _parse_stat,
    kill_processes,
    read_stacks,
    stopped_processes,
)
from dovetail.controller.processes import RayCall, WorkerProcesses
from dovetail.controller.reaper import TAG, tagged_processes
from tests.waiting import wait_until, wait_until_gone

pytestmark = pytest.mark.unit

_PARENT = (
    "import signal, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "print(child.pid, flush=True)\n"
    "signal.pause()\n"
)
# Holds Python's lock in C for as long as it lives: no thread of it can answer anything.
_BUSY = (
    "import sys\n"
    "sys.path.insert(0, {root!r})\n"
    "from dovetail.controller.process_state import offer_stacks\n"
    "print(offer_stacks(), flush=True)\n"
    "def busy_in_c():\n"
    "    sum(range(10**12))\n"
    "busy_in_c()\n"
)


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent.pid, child
        kill_processes([parent.pid, child])


def test_a_stopped_process_is_found(family: tuple[int, int]) -> None:
    parent, _ = family
    assert stopped_processes([parent]) == {}
    os.kill(parent, signal.SIGSTOP)
    wait_until(lambda: parent in stopped_processes([parent]), "its state in the process table")
    assert stopped_processes([parent])[parent].pid == parent
    os.kill(parent, signal.SIGCONT)
    wait_until(lambda: not stopped_processes([parent]), "its state in the process table")


def test_a_stopped_process_below_a_worker_is_the_workers(family: tuple[int, int]) -> None:
    parent, child = family
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: parent in stopped_processes([parent]), "its state in the process table")
    assert stopped_processes([parent])[parent].pid == child


def test_a_stopped_process_can_be_killed(family: tuple[int, int]) -> None:
    parent, child = family
    os.kill(child, signal.SIGSTOP)
    kill_processes([child, parent])
    wait_until_gone(child)


def test_a_process_that_a_debugger_holds_is_not_stopped() -> None:
    line = "4711 (a (strange) name) t 17 4711 4711 0 -1"
    assert _parse_stat(line) == ProcessState(4711, 17, "t", "a (strange) name")
    assert not _parse_stat(line).is_stopped
    assert _parse_stat(line.replace(" t ", " T ")).is_stopped


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="stacks are read through Linux's /proc")
def test_stacks_of_a_process_that_holds_pythons_lock_can_be_read() -> None:
    program = _BUSY.format(root=os.getcwd())
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        file = int(busy.stdout.readline())
        try:
            wait_until(lambda: "in busy_in_c" in read_stacks(busy.pid, file), "its state in the process table")
            assert stopped_processes([busy.pid]) == {}, "busy is not stopped"
        finally:
            busy.kill()


_IN_COLLECTIVE = """Thread 0x01 (most recent call first):
  File "/x/threading.py", line 3 in wait

Current thread 0x02 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3007 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/x/work.py", line 3 in update
  File "/x/dovetail/controller/host.py", line 120 in run
"""
_ELSEWHERE = _IN_COLLECTIVE.replace("torch/distributed", "torch/nn")


def test_of_ranks_that_have_not_finished_the_one_outside_the_collective_hangs() -> None:
    assert waits_in_collective(_IN_COLLECTIVE)
    assert not waits_in_collective(_ELSEWHERE)
    assert find_hung_rank({0: _IN_COLLECTIVE, 1: _ELSEWHERE, 2: _IN_COLLECTIVE}) == 1
    assert find_hung_rank({0: _IN_COLLECTIVE, 3: ""}) == 3, "a rank that cannot even be asked"
    assert find_hung_rank({0: _IN_COLLECTIVE, 1: _IN_COLLECTIVE}) is None
    assert find_hung_rank({0: _ELSEWHERE}) is None


def test_a_collectives_own_time_limit_is_recognised() -> None:
    assert is_collective_timeout(RuntimeError("[gloo/transport/tcp] Timed out waiting 1800000ms for recv operation"))
    assert not is_collective_timeout(RuntimeError("out of memory"))


def test_a_stopped_process_that_somebody_else_has_started_is_found_at_the_one_that_drives_it(
    family: tuple[int, int],
) -> None:
    """As the actor of an engine: Ray is its parent."""
    parent, child = family
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, env={**os.environ, DRIVEN_BY: str(child)}) as driven:
        os.kill(driven.pid, signal.SIGSTOP)
        wait_until(lambda: child in stopped_processes([child]), "its state in the process table")
        assert {pid: state.pid for pid, state in stopped_processes([parent, child]).items()} == {
            parent: driven.pid,
            child: driven.pid,
        }
        driven.kill()


def test_limits_are_learned_from_earlier_calls() -> None:
    limits = CallLimits(first_limit_s=7200.0)
    assert limits.limit("actor", "generate").hung_s == 7200.0
    limits.record("actor", "generate", 100.0, rows=64)
    limits.record("actor", "generate", 50.0, rows=64)
    assert limits.limit("actor", "generate", 64).hung_s == 1000.0
    assert limits.limit("actor", "generate", 64).slow_s == 300.0
    assert limits.limit("actor", "generate", 640).hung_s == 10000.0, "ten times the rows may take ten times as long"
    assert limits.limit("critic", "generate").hung_s == 7200.0
    limits.record("actor", "ping", 0.01)
    assert limits.limit("actor", "ping").hung_s == 600.0, "a fast call on a busy machine is not a hang"


def test_a_call_that_waits_for_something_with_a_deadline_is_not_hung_before_it() -> None:
    """Tools of agents: most steps take seconds, and one waits for half an hour."""
    limits = CallLimits(allowed_s={"generate": 1800.0})
    limits.record("actor", "generate", 5.0)
    limits.record("actor", "update", 5.0)
    assert limits.limit("actor", "generate").hung_s == 2400.0
    assert "may take 1800 s" in limits.limit("actor", "generate").why
    assert limits.limit("actor", "update").hung_s == 600.0
    limits.record("actor", "generate", 700.0)
    assert limits.limit("actor", "generate").hung_s == 7000.0
    short = CallLimits(first_limit_s=100.0, allowed_s={"generate": 1800.0})
    assert short.limit("actor", "generate").hung_s == 2400.0, "the first call, too"


class _Slow(RayCall):
    """Finishes after a moment; needs no Ray."""

    def _take_ready(self, pending: Any, outputs: Any, errors: Any, wait_s: float) -> None:
        time.sleep(0.01)
        if time.monotonic() - self.started > 0.2:
            outputs[pending.popitem()[1]] = "done"


def test_a_caller_that_says_how_long_it_waits_is_not_bound_by_what_earlier_calls_took() -> None:
    processes = WorkerProcesses(["actor"], [], [], failure_grace_s=0.0, limits=CallLimits(0.05))
    processes.limits.record("actor", "finish_saving", 0.001)
    call = _Slow(processes, "actor", "finish_saving", {0: None})  # type: ignore[dict-item]
    assert processes.limits.limit("actor", "finish_saving").hung_s == 0.05
    assert call.wait(timeout=60.0) == {0: "done"}


class _SecondNodeHasAStoppedProcess(Monitors):
    def ask(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert arguments == {"first": [7], "second": [7]}
        return {"first": {}, "second": {7: ProcessState(7, 1, "T", "python")}}


class _Unkillable(WorkerProcesses):
    def _kill(self) -> None:
        pass


def test_of_two_nodes_with_the_same_pid_the_one_whose_process_is_stopped_is_named() -> None:
    """In containers it is usual that pids are the same."""
    processes = _Unkillable(["actor"], [], [], failure_grace_s=0.0)
    processes.identities = [ProcessIdentity(7, f"10.0.0.{n}", name, name) for n, name in enumerate(["first", "second"])]
    watchdog = watchdog_module.Watchdog()
    watchdog.monitors = _SecondNodeHasAStoppedProcess()
    watchdog._stopped_since = dict.fromkeys(processes.identities[1:], float("-inf"))  # for long
    watchdog._look_for_stopped([processes])
    assert processes.failure is not None
    assert (processes.failure.rank, processes.failure.node) == (1, "10.0.0.1")


@pytest.mark.parametrize(("alive", "said"), [(True, "Its process is gone"), (False, "Ray lost its node")])
def test_a_worker_that_went_with_its_node_is_said_to_have(
    monkeypatch: pytest.MonkeyPatch, alive: bool, said: str
) -> None:
    """As when a host's network was cut: nobody should look for what killed the process."""
    monkeypatch.setattr("ray.util.list_named_actors", list)
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "first", "Alive": True}, {"NodeID": "second", "Alive": alive}])
    processes = _Unkillable(["actor"], [], ["name"], failure_grace_s=0.0)
    processes.identities = [ProcessIdentity(7, "10.0.0.1", "second", "second")]
    watchdog = watchdog_module.Watchdog()
    watchdog.monitors = _SecondNodeHasAStoppedProcess()
    watchdog._watched.add(processes)
    watchdog._looked_for_stopped = float("inf")
    watchdog.look()
    assert processes.failure is not None
    assert said in str(processes.failure)
    assert "on node 10.0.0.1" in str(processes.failure)


def test_a_death_that_no_call_has_raised_ends_with_its_group() -> None:
    """One event kills two groups; the run raises the first death and shuts both down. The next run must not meet the
    second one, nor one that the watchdog notes late."""
    watchdog = watchdog_module.Watchdog()
    groups = [_Unkillable([role], [], [], failure_grace_s=0.0) for role in ("actor", "engines", "teacher")]
    errors = [group.report_death(0, "killed") for group in groups]
    for group, error in zip(groups[:2], errors, strict=False):
        group.watchdog = watchdog
        watchdog._note(group, error)
    assert watchdog.take_unreported() is errors[0]
    for group in groups:
        group.stop()
    watchdog._note(groups[2], errors[2])
    assert watchdog.take_unreported() is None


ROOT = Path(__file__).parents[2]
# Starts what Ray starts: a process in a session of its own, which takes no notice of SIGTERM.
_DRIVER = f"""
import os, signal, subprocess, sys
from dovetail.controller.cluster import _start_reaper
_start_reaper()
agent = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, start_new_session=True) as started:
    started.stdout.readline()
    print(os.environ["{TAG}"], flush=True)
    signal.pause()
"""


def test_what_a_killed_driver_started_ends_also_where_sigterm_is_ignored() -> None:
    env = {name: value for name, value in os.environ.items() if name != TAG}
    with subprocess.Popen([sys.executable, "-c", _DRIVER], cwd=ROOT, env=env, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        tag = driver.stdout.readline().decode().strip()
        try:
            both = tagged_processes(tag)
            assert len(both) == 2, "the agent, and the reaper itself"
            os.kill(driver.pid, signal.SIGKILL)
            wait_until(lambda: not tagged_processes(tag), "the end of what the driver started, and of the reaper")
        finally:
            driver.kill()
            kill_processes(tagged_processes(tag))
