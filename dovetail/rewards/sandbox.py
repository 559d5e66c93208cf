"""Where an answer's program runs: in a limited process on this machine, or in a service elsewhere.

`LocalSandbox` limits time, memory, output and processes. It is no jail: the program sees the file system and the
network. Use a remote sandbox or a container for models you do not trust.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from typing import Any, Protocol

_MAX_OUTPUT = 1 << 20
# Loaded before any fork: what runs between fork and exec must not import or lock.
_LIBC = ctypes.CDLL(None)


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
    """A child process with limits, in an empty folder, with a bare environment."""

    def run(self, code: str, *, stdin: str, timeout: float, memory_limit_mb: int) -> ProgramRun:
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            with open(os.path.join(folder, "program.py"), "w") as file:
                file.write(code)
            return _run_limited(folder, stdin, timeout, memory_limit_mb)


class RemoteSandbox:
    """A SandboxFusion service: `POST <url>` with code and input as JSON."""

    def __init__(self, url: str, *, attempts: int = 3, patience: float = 10.0) -> None:
        self._url = url
        self._attempts = attempts
        self._patience = patience

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
                with urllib.request.urlopen(request, timeout=timeout + self._patience) as reply:
                    return json.load(reply)
            except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors; ValueError: not JSON.
                problem = error
        raise SandboxUnavailable(f"the sandbox {self._url} cannot be used after {self._attempts} attempts: {problem}")


def _run_limited(folder: str, stdin: str, timeout: float, memory_limit_mb: int) -> ProgramRun:
    out, err = os.path.join(folder, ".stdout"), os.path.join(folder, ".stderr")

    def limit() -> None:
        megabytes = memory_limit_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (megabytes, megabytes))
        resource.setrlimit(resource.RLIMIT_CPU, (int(timeout) + 1, int(timeout) + 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_OUTPUT * 16, _MAX_OUTPUT * 16))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            # PR_SET_PDEATHSIG: the program has a group of its own, so a kill of the scoring process would miss it.
            _LIBC.prctl(1, signal.SIGKILL)

    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "program.py"],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                start_new_session=True,
                preexec_fn=limit,
            )
        except OSError as error:
            raise SandboxUnavailable(f"no process for the program: {error}") from error
        timed_out = False
        try:
            process.communicate(stdin.encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):  # It has ended, with all it had started.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return ProgramRun(process.returncode == 0 and not timed_out, _read(out), _read(err), timed_out)


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MAX_OUTPUT).decode(errors="replace")
