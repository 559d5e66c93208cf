"""A call that hangs in the one process of `--local`: the run names it, keeps its checkpoint and ends with code 75."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.store import LATEST_NAME, CheckpointStore
from dovetail.cli.main import main
from dovetail.controller import hangs
from dovetail.observability import waits
from dovetail.observability.run_folder import NOW, RunFolder
from dovetail.rollout.native.engine import NativeEngine
from tests.programs import ENVIRONMENT, ROOT, run_program
from tests.trainer.toy_run import Toy

pytestmark = pytest.mark.e2e

SAVING = {"trainer.save_freq": 1}
HANGS_OUTSIDE_OF_PYTHON = """
import ctypes
import sys
from pathlib import Path

if "dovetail.trainer.run" in sys.modules:  # scoring processes import this, too
    from dovetail.controller import hangs
    from dovetail.observability import waits
    from dovetail.rollout.native.engine import NativeEngine
    from dovetail.trainer import stopping

    hangs.HUNG_LEAST_S, hangs.HUNG_TIMES, waits.LOOK_S, stopping.EXIT_S = 3.0, 1.0, 0.1, 1.0
    step = NativeEngine._step

    def lock_twice(engine):
        if Path({after!r}).exists():
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # goes on waiting after a signal
        return step(engine)

    NativeEngine._step = lock_twice
"""


def says_who_hangs(text: str, folder: Path) -> None:
    """On standard error, in the events and in the state that the dashboard shows."""
    assert "actor_rollout_ref[rank 0] hangs (pid" in text
    assert "in 'generate_sequences'" in text
    assert "Not finished after" in text
    assert "Stacks of actor_rollout_ref[rank 0]" in text
    assert "In phase 'gen' of step 2. The same command continues the run from step 1." in text
    (event,) = [event for event in RunFolder(folder).read_events() if event["kind"] == "worker_failed"]
    assert (event["step"], event["phase"], event["method"]) == (2, "gen", "generate_sequences")
    now: dict[str, Any] = json.loads((folder / NOW).read_text())
    assert now["failed"].startswith("It failed in phase 'gen' of step 2: actor_rollout_ref[rank 0]")
    assert CheckpointStore(folder).latest() == folder / "global_step_1"


def test_an_engine_that_waits_for_ever_in_python_is_interrupted_and_the_run_ends(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, step = tmp_path / "run", NativeEngine._step

    def hang(engine: NativeEngine) -> bool:
        if (folder / LATEST_NAME).exists():
            threading.Event().wait()
        return step(engine)

    monkeypatch.setattr(NativeEngine, "_step", hang)
    monkeypatch.setattr(hangs, "HUNG_LEAST_S", 3.0)
    monkeypatch.setattr(hangs, "HUNG_TIMES", 1.0)
    monkeypatch.setattr(waits, "LOOK_S", 0.1)
    monkeypatch.setattr(waits, "_REGISTER", waits._Register())
    assert main(["train", "--local", *toy.arguments(folder, SAVING)]) == 75
    says_who_hangs(capsys.readouterr().err, folder)


def test_an_engine_that_hangs_outside_of_python_is_named_and_the_process_exits(toy: Toy, tmp_path: Path) -> None:
    """A run in a process of its own (15 s), because nothing but its end ends it."""
    folder = tmp_path / "run"
    (tmp_path / "hang_here.py").write_text(HANGS_OUTSIDE_OF_PYTHON.format(after=str(folder / LATEST_NAME)))
    keys = {**SAVING, "trainer.import_modules": ["hang_here"]}
    env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = run_program(["dovetail", "train", "--local", *toy.arguments(folder, keys)], env=env)
    assert done.returncode == 75, done.stdout
    says_who_hangs(done.stdout, folder)
