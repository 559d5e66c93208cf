"""Two real processes and one folder: the second is refused and writes nothing; a dead owner's lock is taken over."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dovetail.observability.run_lock import LOCK, STALE_AFTER_S, RunFolderInUse, RunLock
from tests.programs import holding

pytestmark = pytest.mark.unit


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


def test_the_second_run_is_refused_by_name_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with holding(tmp_path) as process:
        before = _files(tmp_path)
        for enter in (lambda: RunLock(tmp_path).refuse_if_held(), lambda: RunLock(tmp_path).__enter__()):
            with pytest.raises(RunFolderInUse, match=rf"in use by another run .*pid {process.pid} on") as caught:
                enter()
            assert "trainer.experiment_name" in str(caught.value)
        assert _files(tmp_path) == before


def test_the_lock_goes_with_its_run(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(RunFolderInUse):
            RunLock(tmp_path).__enter__()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_is_recognised_at_once(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert (tmp_path / LOCK).exists()
        with RunLock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_dead_owner_that_nobody_has_waited_for_is_recognised(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        with RunLock(tmp_path):
            pass


@pytest.mark.parametrize(
    ("changes", "age_s", "is_held"),
    [
        ({}, 0, True),
        ({"boot_id": "an earlier boot"}, 0, False),
        ({"process_started": "another process had this pid"}, 0, False),
        ({"host": "elsewhere"}, 0, True),
        ({"host": "elsewhere"}, STALE_AFTER_S + 1, False),
        ({"pid_namespace": "pid:[1]"}, 0, True),
        ({"pid_namespace": "pid:[1]"}, STALE_AFTER_S + 1, False),
    ],
)
def test_who_counts_as_alive(changes: dict[str, str], age_s: float, is_held: bool, tmp_path: Path) -> None:
    lock = tmp_path / LOCK
    with holding(tmp_path):
        lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))
        touched = lock.stat().st_mtime - age_s
        os.utime(lock, (touched, touched))
        if is_held:
            with pytest.raises(RunFolderInUse):
                RunLock(tmp_path).__enter__()
        else:
            with RunLock(tmp_path):
                pass


def test_half_a_lock_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"owner": ')
    with RunLock(tmp_path):
        pass
