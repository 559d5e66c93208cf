"""Faults inside `dovetail train` on two Ray workers: each ends the run by itself, names who and where, loses nothing.

Each test is a whole run (about 30 s on two cores): the claim is that the parts together, from the process table to the
exit code of the command, do this; `tests/controller` shows the parts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.store import CheckpointStore
from dovetail.controller.process_state import kill_processes
from dovetail.controller.reaper import TAG, tagged_processes
from dovetail.observability.run_folder import EVENTS, NOW, read_json_lines
from tests.trainer.toy_run import Toy
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

ROOT = Path(__file__).parents[2]
TWO: dict[str, Any] = {
    "trainer.n_gpus_per_node": 2,
    "trainer.total_training_steps": 500,
    "trainer.save_freq": 1,
    "trainer.max_actor_ckpt_to_keep": 2,
}
SECONDS = 240.0
"""How long a test waits for something on a busy machine; how soon it comes is not what is claimed here."""


@dataclass
class Run:
    """`dovetail train` as a process, and what it leaves in its folder."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path

    def wait_for(self, what: Callable[[], bool]) -> None:
        def asked() -> bool:
            assert self.process.poll() is None, f"the run has ended:\n{self.log.read_text()}"
            return what()

        wait_until(asked, f"what the test waits for; see {self.log}", seconds=SECONDS)

    def now(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / NOW).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def is_in(self, phase: str, *, from_step: int) -> bool:
        now = self.now()
        return now.get("phase") == phase and now["step"] >= from_step

    def workers(self) -> list[int]:
        """The pids of the ranks, in the order in which they were started."""
        found = []
        for pid in tagged_processes(self.tag):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
            if title.startswith(b"ray::WorkerHost"):
                found.append(pid)
        return sorted(found)

    @property
    def tag(self) -> str:
        """Of the run's Ray: its reaper has it on its command line."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"reaper.py") for word in words):
                return words[-2].decode()
        return "not started"

    def ends(self) -> tuple[int, str]:
        code = self.process.wait(SECONDS)
        return code, self.log.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.folder / EVENTS) if event["kind"] == kind]


@contextmanager
def running(toy: Toy, folder: Path, changes: dict[str, Any]) -> Iterator[Run]:
    log = folder / "log.txt"
    command = [sys.executable, "-m", "dovetail.cli.main", "train", *toy.arguments(folder / "run", changes)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != TAG}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, text=True)
        run = Run(process, folder / "run", log)
        tag = "not started"
        try:
            run.wait_for(lambda: run.tag != "not started")
            tag = run.tag
            yield run
        finally:
            process.kill()
            process.wait()
            kill_processes(tagged_processes(tag))


# `controller/test_worker_failures` stops a worker; what a run does then is what it does when one was killed.
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["gen", "update_actor"])
def test_a_stopped_worker_is_named_and_the_run_ends_with_its_checkpoint(toy: Toy, tmp_path: Path, phase: str) -> None:
    with running(toy, tmp_path, TWO) as run:
        run.wait_for(lambda: run.is_in(phase, from_step=3))
        victim = run.workers()[1]
        os.kill(victim, signal.SIGSTOP)
        code, text = run.ends()
        assert code == 75, text
        said = re.search(r"^(\w+)\[rank (\d)\] hangs \(pid (\d+) on node \S+\) (.*)$", text, re.MULTILINE)
        assert said is not None, text
        assert int(said[3]) == victim, "the one that was stopped, not the one that waited for it"
        assert "is stopped (SIGSTOP" in said[4]
        (event,) = run.events("worker_failed")
        assert event["rank"] == int(said[2])
        assert event["phase"] is not None
        assert f"In phase {event['phase']!r} of step {event['step']}. The same command continues" in text
        assert "Traceback" not in text.partition(" hangs ")[0]
        latest = CheckpointStore(run.folder).latest()
        assert latest is not None
        assert not Path(f"/proc/{victim}").exists(), "SIGKILL ends a stopped process too"


def test_a_worker_that_is_killed_inside_a_run_is_named_and_nothing_is_left(toy: Toy, tmp_path: Path) -> None:
    with running(toy, tmp_path, TWO) as run:
        run.wait_for(lambda: run.is_in("update_actor", from_step=2))
        tag, victim = run.tag, run.workers()[0]
        os.kill(victim, signal.SIGKILL)
        code, text = run.ends()
        assert code == 1, text
        said = re.search(rf"\[rank (\d)\] died \(pid {victim} on node", text)
        assert said is not None, text
        (event,) = run.events("worker_failed")
        assert event["rank"] == int(said[1])
        assert event["phase"] is not None
        assert f"In phase {event['phase']!r} of step {event['step']}. The same command continues" in text
        assert "Traceback" not in text.partition(" died ")[0]
        who = f"{event['role']}[rank {event['rank']}], {event['method']}: {event['reason']}"
        assert run.now()["failed"] == f"It failed in phase {event['phase']!r} of step {event['step']}: {who}"
        assert CheckpointStore(run.folder).latest() is not None
        all_end(tag)


def all_end(tag: str) -> None:
    """Every process of the run's Ray."""
    wait_until(lambda: not tagged_processes(tag), f"the end of the processes with the tag {tag}", seconds=SECONDS)
