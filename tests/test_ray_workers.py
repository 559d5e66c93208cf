"""A forked worker is, to Ray, the program that Ray has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_workers import quick_workers
from tests.waiting import wait_until, wait_until_gone

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="a fork of a process with torch in it"),
]


def _start(folder: Path, code: str) -> subprocess.Popen[str]:
    script = folder / "worker.py"
    script.write_text(code)
    command = [*quick_workers()["py_executable"].split(), str(script), "--flag=a b"]
    environment = {"PATH": os.environ["PATH"], "ONLY": "this"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_worker_has_the_arguments_environment_folder_and_output_of_its_program(tmp_path: Path) -> None:
    says = "sys.argv[1:], os.environ['ONLY'], os.environ.get('HOME'), os.getcwd(), 'torch' in sys.modules"
    program = _start(tmp_path, f"import os, sys; print({says})")
    assert program.communicate(timeout=120)[0] == f"['--flag=a b'] this None {tmp_path} True\n"


def test_a_worker_is_in_a_process_group_of_its_own(tmp_path: Path) -> None:
    """Ray kills the group of a worker that has ended."""
    program = _start(tmp_path, "import os; print(os.getpgrp() == os.getpid())")
    assert program.communicate(timeout=120)[0] == "True\n"


def test_a_worker_is_killed_when_its_program_is(tmp_path: Path) -> None:
    code = "import os, threading; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid')\n"
    program = _start(tmp_path, code + "threading.Event().wait()\n")
    wait_until((tmp_path / "pid").exists, "the worker's start")
    pid = int((tmp_path / "pid").read_text())
    assert pid != program.pid
    program.kill()
    program.wait(10)
    wait_until_gone(pid)
