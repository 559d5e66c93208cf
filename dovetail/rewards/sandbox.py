"""Where an answer's program runs: in a limited process on this machine, or in a service elsewhere.

`LocalSandbox` limits time, memory and output, and ends a program with everything it started. Where the machine allows
namespaces the program also sees no network and none of your files; `detect_isolation` says what holds here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import logging
import os
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dovetail.observability.disk import free_bytes

# Without `site`, whose search for .pth files is slow; the launcher adds the packages itself.
_SERVER = [
    sys.executable, "-I", "-S", "-c",
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import program_launcher; sys.path.pop(); "
    "sys.exit(program_launcher.serve())",
]  # fmt: skip
_PROBE_SECONDS = 30
_MAX_PROCESSES = 64


@dataclass(frozen=True)
class Isolation:
    """`is_sandbox`: own files, no network, limited processes. Otherwise `missing` says why not."""

    is_sandbox: bool
    ends_orphans: bool
    missing: str = ""

    def describe(self) -> str:
        """One line for the console."""
        if self.is_sandbox:
            return (
                "programs run in a sandbox: they see the interpreter and an empty folder, no network, at most "
                f"{_MAX_PROCESSES} processes, and end with everything they started."
            )
        orphans = "end with everything they started" if self.ends_orphans else "may leave processes behind"
        return (
            f"programs are NOT sandboxed on this machine ({self.missing}): they can read your files and use the "
            f"network. Time, memory and output are limited; programs {orphans}."
        )


@functools.cache
def detect_isolation() -> Isolation:
    """Tries a program in namespaces of its own; what the kernel, a container or AppArmor forbids shows here."""
    if sys.platform != "linux":
        return Isolation(False, False, f"namespaces are Linux's; this is {sys.platform}")
    problem = _try_namespaces(Isolation(True, True))
    return Isolation(True, True) if problem is None else Isolation(False, True, problem)


def _try_namespaces(isolation: Isolation) -> str | None:
    """None when a program ran and could not see its own file; otherwise why not."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        program = os.path.join(folder, "program.py")
        with open(program, "w") as file:
            file.write(f"import os, json\nprint(os.path.exists({program!r}))")
        try:
            done = _run_limited(folder, "", _PROBE_SECONDS, 1 << 10, isolation)
        except SandboxUnavailable as error:
            return str(error)
    if done.ok and done.stdout.strip() == "False":
        return None
    return done.stderr.strip()[-200:] or "it hid no files"


@functools.cache
def _interpreter_folders() -> list[str]:
    """What the interpreter needs to run and import its packages, outermost first. Not the user's home."""
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    folders = sorted({path for folder in wanted for path in (folder, os.path.realpath(folder)) if folder}, key=len)
    home = os.path.realpath(os.path.expanduser("~"))
    hidden = {"/", home, *map(str, Path(home).parents)}
    kept: list[str] = []
    for folder in folders:
        if folder not in hidden and not any(folder == outer or folder.startswith(outer + "/") for outer in kept):
            kept.append(folder)
    return kept


logger = logging.getLogger(__name__)

_MAX_OUTPUT = 1 << 20
_LAUNCHER_SECONDS = 30.0
_LEAST_FREE = 1 << 16
"""Bytes. With less, a program that has failed may only have found no room for its output."""


class SandboxUnavailable(RuntimeError):
    """The sandbox itself failed. Says nothing about the program."""


@dataclass(frozen=True)
class ProgramRun:
    """What a program did. `ok`: it ended by itself, in time, with exit code 0."""

    ok: bool
    stdout: str
    stderr: str
    timed_out: bool = False


class Sandbox(Protocol):
    """Runs one Python program to its end. Raises `SandboxUnavailable` when it cannot."""

    def run(self, code: str, *, stdin: str, timeout: float, memory_limit_mb: int) -> ProgramRun: ...


class LocalSandbox:
    """A child process with limits, an empty folder and a bare environment; isolated where the machine allows it."""

    def __init__(self, *, isolation: Isolation | None = None, required: bool = False) -> None:
        self._isolation = isolation or detect_isolation()
        if required and not self._isolation.is_sandbox:
            raise SandboxUnavailable(
                f"reward_model.code_isolation=required, but {self._isolation.describe()} Set it to auto to run "
                "programs all the same, or name a remote sandbox in reward_model.sandbox_fusion.url."
            )

    def run(self, code: str, *, stdin: str, timeout: float, memory_limit_mb: int) -> ProgramRun:
        with tempfile.TemporaryDirectory(prefix="program-") as folder:
            with open(os.path.join(folder, "program.py"), "w") as file:
                file.write(code)
            return _run_limited(folder, stdin, timeout, memory_limit_mb, self._isolation)


def announce_isolation(*, required: bool) -> None:
    """Say once, before training, what programs can reach on this machine; stop where that is not enough."""
    isolation = detect_isolation()
    LocalSandbox(isolation=isolation, required=required)
    logger.log(logging.INFO if isolation.is_sandbox else logging.WARNING, "code rewards: %s", isolation.describe())


class RemoteSandbox:
    """A SandboxFusion service: `POST <url>` with code and input as JSON."""

    def __init__(self, url: str, *, attempts: int = 3, grace: float = 10.0) -> None:
        self._url = url
        self._attempts = attempts
        self._grace = grace

    def run(self, code: str, *, stdin: str, timeout: float, memory_limit_mb: int) -> ProgramRun:
        request = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": timeout,
            "run_timeout": timeout,
            "memory_limit_MB": memory_limit_mb,
        }
        reply = self._post(json.dumps(request).encode(), timeout)
        if reply.get("status") not in ("Success", "Failed"):
            raise SandboxUnavailable(f"the sandbox {self._url} says {reply.get('status')!r}: {reply.get('message')}")
        result = reply.get("run_result") or reply.get("compile_result") or {}
        timed_out = result.get("status") == "TimeLimitExceeded"
        ok = reply["status"] == "Success" and not timed_out and result.get("return_code", 0) == 0
        return ProgramRun(ok, result.get("stdout") or "", result.get("stderr") or "", timed_out)

    def _post(self, body: bytes, timeout: float) -> dict[str, Any]:
        problem: Exception | None = None
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=timeout + self._grace) as reply:
                    return json.load(reply)
            except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors; ValueError: not JSON.
                problem = error
        raise SandboxUnavailable(f"the sandbox {self._url} cannot be used after {self._attempts} attempts: {problem}")


class _LauncherServer:
    """A process that forks a launcher for each program, so that the interpreter starts once and not each time.

    It ends when its socket is closed, which the kernel does for a process that is killed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, settings: Mapping[str, object], files: Sequence[int]) -> int:
        """The pid of a launcher, leader of its own session. `files`: stdin, stdout, stderr and where it reports."""
        message = "\0".join(str(word) for setting in settings.items() for word in setting).encode()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it was killed
                    return self._ask(self._socket, message, files)
            return self._ask(self._start(), message, files)

    def stop(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def forget(self) -> None:
        """In a forked process: the server is its parent's."""
        if self._socket is not None:
            self._socket.close()
        self._lock, self._socket, self._process = threading.Lock(), None, None

    def _start(self) -> socket.socket:
        self.stop()
        own, other = socket.socketpair()
        own.settimeout(_LAUNCHER_SECONDS)
        with other:
            self._process = subprocess.Popen(
                _SERVER,
                cwd="/",
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._socket = own
        return own

    @staticmethod
    def _ask(server: socket.socket, message: bytes, files: Sequence[int]) -> int:
        socket.send_fds(server, [len(message).to_bytes(4, "big") + message], list(files))
        reply = server.recv(4)
        if len(reply) < 4:
            raise ConnectionResetError("the process that starts programs has ended")
        return int.from_bytes(reply, "big")


_launchers = _LauncherServer()
atexit.register(_launchers.stop)
os.register_at_fork(after_in_child=_launchers.forget)


def _run_limited(folder: str, stdin: str, timeout: float, memory_limit_mb: int, isolation: Isolation) -> ProgramRun:
    paths = [os.path.join(folder, name) for name in (".stdin", ".stdout", ".stderr")]
    work = os.path.join(folder, "work")
    os.mkdir(work)
    Path(paths[0]).write_text(stdin)
    settings = {
        "program": os.path.join(folder, "program.py"),
        "root": work,
        "timeout": timeout,
        "memory": memory_limit_mb << 20,
        "output": _MAX_OUTPUT * 16,
        "isolate": "yes" if isolation.is_sandbox else "no",
        "readable": os.pathsep.join(_interpreter_folders()),
        "processes": _MAX_PROCESSES,
        "packages": os.pathsep.join(site.getsitepackages()),
    }
    ended, report = os.pipe()
    with open(ended, "rb", buffering=0) as reports, contextlib.ExitStack() as opened:
        opened.callback(os.close, report)
        files = [
            opened.enter_context(open(path, mode)).fileno()
            for path, mode in zip(paths, ("rb", "wb", "wb"), strict=True)
        ]
        try:
            launcher = _launchers.launch(settings, [*files, report])
        except OSError as error:
            raise SandboxUnavailable(f"no process for the program: {error}") from error
        opened.close()
        kind, _, detail = _wait(reports, launcher, timeout + _LAUNCHER_SECONDS).partition(" ")
    if kind not in ("exit", "timeout"):
        raise SandboxUnavailable(f"the program could not be started: {detail or _read(paths[2])[-500:]}")
    done = ProgramRun((kind, detail) == ("exit", "0"), _read(paths[1]), _read(paths[2]), kind == "timeout")
    if not done.ok and free_bytes(Path(folder)) < _LEAST_FREE:
        raise SandboxUnavailable(f"the disk of {tempfile.gettempdir()} is full; free some space, or set TMPDIR.")
    return done


def _wait(reports: io.FileIO, launcher: int, seconds: float) -> str:
    """What the launcher reports at its end. It keeps the program's time; `seconds` are for one that hangs itself."""
    poll = select.poll()
    poll.register(reports, select.POLLIN | select.POLLHUP)
    if not poll.poll(seconds * 1000):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher, signal.SIGKILL)
        raise SandboxUnavailable(f"the launcher did not end its program in {seconds:g} s.")
    return reports.read(1 << 12).decode()


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MAX_OUTPUT).decode(errors="replace")
