"""Where an answer's program runs: in a limited process on this machine, or in a service elsewhere.

`LocalSandbox` limits time, memory and output, and ends a program with everything it started. Where the machine allows
namespaces the program also sees no network and none of your files; `detect_isolation` says what holds here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Imported, not run as a script: that would compile it for every program.
_LAUNCH = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import program_launcher; sys.path.pop(); "
    "sys.exit(program_launcher.main())"
)
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

    def command(self, *, program: str, root: str, timeout: float, memory: int, output: int, report: int) -> list[str]:
        """The command line that runs a program this way."""
        settings = {
            "program": program,
            "root": root,
            "timeout": timeout,
            "memory": memory,
            "output": output,
            "report": report,
            "isolate": "yes" if self.is_sandbox else "no",
            "readable": os.pathsep.join(_interpreter_folders()),
            "processes": _MAX_PROCESSES,
        }
        words = [str(word) for setting in settings.items() for word in setting]
        return [sys.executable, "-I", "-c", _LAUNCH, *words]


@functools.cache
def detect_isolation() -> Isolation:
    """Tries a program in namespaces of its own; what the kernel, a container or AppArmor forbids shows here."""
    if sys.platform != "linux":
        return Isolation(False, False, f"namespaces are Linux's; this is {sys.platform}")
    problem = _try_namespaces(Isolation(True, True))
    return Isolation(True, True) if problem is None else Isolation(False, True, problem)


def _try_namespaces(isolation: Isolation) -> str | None:
    """None when a program ran and could not see this file; otherwise why not."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        program, work = os.path.join(folder, "program.py"), os.path.join(folder, "work")
        os.mkdir(work)
        with open(program, "w") as file:
            file.write(f"import os, json\nprint(os.path.exists({program!r}))")
        ended, report = os.pipe()
        command = isolation.command(
            program=program, root=work, timeout=_PROBE_SECONDS, memory=1 << 30, output=1 << 20, report=report
        )
        with open(ended, "rb") as reports:
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(report,),
                    timeout=2 * _PROBE_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "a first program in namespaces of its own did not end"
            finally:
                os.close(report)
            said = reports.read().decode()
    if said == "exit 0" and done.stdout.strip() == "False":
        return None
    return said.removeprefix("unavailable ").strip() or done.stderr.strip()[-200:] or "it hid no files"


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


def _run_limited(folder: str, stdin: str, timeout: float, memory_limit_mb: int, isolation: Isolation) -> ProgramRun:
    out, err = os.path.join(folder, ".stdout"), os.path.join(folder, ".stderr")
    work = os.path.join(folder, "work")
    os.mkdir(work)
    ended, report = os.pipe()
    command = isolation.command(
        program=os.path.join(folder, "program.py"),
        root=work,
        timeout=timeout,
        memory=memory_limit_mb << 20,
        output=_MAX_OUTPUT * 16,
        report=report,
    )
    with open(ended, "rb") as reports, open(out, "wb") as stdout, open(err, "wb") as stderr:
        try:
            process = subprocess.Popen(
                command,
                cwd=work,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
                pass_fds=(report,),
            )
        except OSError as error:
            raise SandboxUnavailable(f"no process for the program: {error}") from error
        finally:
            os.close(report)
        try:
            # The launcher keeps the time; this limit is for a launcher that hangs itself.
            process.communicate(stdin.encode(), timeout=timeout + _LAUNCHER_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SandboxUnavailable(f"the launcher did not end its program in {error.timeout:g} s.") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # It has ended.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        kind, _, detail = reports.read().decode().partition(" ")
    if kind not in ("exit", "timeout"):
        raise SandboxUnavailable(f"the program could not be started: {detail or _read(err)[-500:]}")
    return ProgramRun((kind, detail) == ("exit", "0"), _read(out), _read(err), kind == "timeout")


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MAX_OUTPUT).decode(errors="replace")
