"""A driver that is killed with SIGKILL leaves no process of its Ray behind; `trainer/test_workers` kills a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.controller.process_state import kill_processes
from dovetail.controller.reaper import TAG, tagged_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.unit

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
