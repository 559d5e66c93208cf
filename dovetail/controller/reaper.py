"""Ends a local Ray whose driver is gone. A program of its own: `python reaper.py <pid of the driver> <tag>`.

A driver that is killed with SIGKILL cleans up nothing, and Ray's agents and an engine's processes would live on. They
all carry the driver's tag in their environment. Imports nothing but the standard library: it must start at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

TAG = "DOVETAIL_DRIVER"
"""Variable that names the driver in every process below it."""
_LOOK_S = 0.5
_GRACE_S = 2.0


def tagged_processes(tag: str) -> list[int]:
    """Processes of this machine that were started by the driver of ``tag``, or by those it started."""
    wanted = f"{TAG}={tag}"
    if sys.platform != "linux":
        lines = subprocess.run(
            ["ps", "-axEww", "-o", "pid=,command="], capture_output=True, text=True, check=False, timeout=30
        ).stdout
        pids = [int(line.split(None, 1)[0]) for line in lines.splitlines() if wanted in line]
        return [pid for pid in pids if pid != os.getpid()]
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # it has ended, or is another user's
            if wanted.encode() in file.read().split(b"\0") and int(name) != os.getpid():
                pids.append(int(name))
    return pids


def end_tagged(tag: str) -> None:
    """SIGTERM, and SIGKILL for those that are still there a moment later, and for what they have started meanwhile."""
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 0.5), (signal.SIGKILL, 0.5)):
        left = tagged_processes(tag)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        end = time.monotonic() + grace_s
        while left and time.monotonic() < end:
            time.sleep(0.1)
            left = tagged_processes(tag)


def main(driver: int, tag: str) -> None:
    """Until the driver ends this program, which it does when it has stopped its Ray itself, or is gone."""
    while os.getppid() == driver:
        time.sleep(_LOOK_S)
    end_tagged(tag)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
