"""`RunLock`: one run per folder. A file `run.lock` names the owner; a lock whose owner is gone is taken over.

Gone means: on this machine, that its process is (same pid, another start counts as gone) or that the machine was
started again; on another machine, that the file has not been touched for `STALE_AFTER_S`. A refused run writes nothing.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LOCK = "run.lock"
HEARTBEAT_S = 10.0
STALE_AFTER_S = 120.0
"""Clocks of two machines differ, and a busy file server may be late: give an owner elsewhere a dozen heartbeats."""
_WAIT_S = 30.0


class RunFolderInUse(RuntimeError):
    """Another run writes to the folder. The message says whose it is."""


class RunLock:
    """Hold the folder of a run. A context manager; the folder must exist before it is entered."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._file = Path(folder) / LOCK
        self._owner = _this_process()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def refuse_if_held(self) -> None:
        """Raise `RunFolderInUse` if a run that is alive holds the folder; look only."""
        owner = _read(self._file)
        if owner is not None and _is_alive(owner, self._file):
            raise RunFolderInUse(_message(self._file, owner))

    def __enter__(self) -> RunLock:
        handle = self._open_exclusively()
        try:
            self.refuse_if_held()
            if (owner := _read(self._file)) is not None:
                logger.warning("%s is of a run that has ended (%s); taking the folder over", self._file, _words(owner))
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(self._owner).encode() + b"\n", 0)
        finally:
            os.close(handle)
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._heart.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
        if _read(self._file) == self._owner:
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                os.utime(self._file)
            except OSError as error:
                logger.warning("%s cannot be touched (%s); a run on another machine may take it for stale",
                               self._file, error)  # fmt: skip

    def _open_exclusively(self) -> int:
        """The lock file, open and locked by the system for the moment in which its owner is read and written."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last owner may have removed the file between our two calls.
                if os.path.exists(self._file) and os.path.samestat(os.fstat(handle), os.stat(self._file)):
                    return handle
            except BlockingIOError:
                pass
            os.close(handle)
            if time.monotonic() > deadline:
                raise RunFolderInUse(f"{self._file} is being written by another process for {_WAIT_S:.0f} s already.")
            time.sleep(0.05)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    try:
        owner = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        owner = str(os.getuid())
    return {
        "owner": owner,
        "host": socket.gethostname(),
        "pid": pid,
        "process_started": _started(pid),
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "time": round(time.time(), 3),
    }


def _is_alive(owner: dict[str, Any], file: Path) -> bool:
    here = _this_process()
    if owner.get("host") != here["host"] or owner.get("pid_namespace") != here["pid_namespace"]:
        try:
            return time.time() - file.stat().st_mtime < STALE_AFTER_S
        except FileNotFoundError:
            return False
    if owner.get("boot_id") != here["boot_id"]:
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (ProcessLookupError, KeyError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's process: it is there
    return owner.get("process_started") == _started(int(owner["pid"]))


def _read(file: Path) -> dict[str, Any] | None:
    """The owner; None where there is no lock, or one that was never finished."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _message(file: Path, owner: dict[str, Any]) -> str:
    return (
        f"{file.parent} is in use by another run ({_words(owner)}); wait for it, or set trainer.experiment_name or "
        f"trainer.default_local_dir to another folder. If that run is dead, remove {file}."
    )


def _words(owner: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner.get("time") or 0)))
    return f"{owner.get('owner')}, pid {owner.get('pid')} on {owner.get('host')}, since {since}"


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot: tells it from a later one with the same pid. Linux only."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    # A zombie is dead: its parent has not asked for its exit code yet, and in a container perhaps never will.
    return "dead" if state in "ZX" else rest[18]


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    """Containers may share a host's name and not its pids."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
