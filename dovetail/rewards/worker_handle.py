"""The driver's side of one scoring process: start it, give it a call, read its reply, kill it. Decides nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import IO, Any

from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import StartMessage

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
_LOG_LIMIT = 1 << 20
_TAIL = 4000


class WorkerHandle:
    """One process, its socket, and the call it is busy with."""

    def __init__(self, start_message: StartMessage) -> None:
        ours, theirs = socket.socketpair()
        # What the function prints goes here, not into the driver's console; the end of it explains a crash.
        self.log: IO[bytes] = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115  lives as long as the worker  # noqa: SIM115  lives as long as the worker
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dovetail.rewards.worker_process", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send(start_message)
        self.is_ready = False
        self.start_failure: Failure | None = None
        self.future: Future[Any] | None = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_active(self) -> bool:
        """Whether something is expected from it: that it is ready, or a result."""
        return self.start_failure is None and (not self.is_ready or self.future is not None)

    def receive(self) -> tuple[str, Any]:
        message = self.connection.recv_bytes()
        try:
            return pickle.loads(message)
        except Exception:  # noqa: BLE001  the process boundary: a value of a type that only the other side knows
            return "exception", f"the result cannot be read here:\n{traceback.format_exc()}"

    def wait_until_ready(self, deadline: float) -> None:
        """Block until the functions are loaded; what goes wrong there is an error before anything is trained."""
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise RewardError(f"a scoring process did not start within {START_SECONDS:g} s. {self.printed()}")
        try:
            kind, value = self.receive()
        except (EOFError, OSError):
            raise RewardError(f"a scoring process died while it started: {self.last_words()}") from None
        if kind == "unusable":
            raise RewardError(value)
        if kind != "ready":
            raise RewardError(f"the reward function cannot be used. {_last_line(value)}\n{value}")
        self.is_ready = True

    def begin(self, message: bytes, future: Future[Any], timeout: float) -> None:
        if os.fstat(self.log.fileno()).st_size > _LOG_LIMIT:
            os.ftruncate(self.log.fileno(), 0)
        self.future = future
        self.deadline = time.monotonic() + timeout
        try:
            self.connection.send_bytes(message)
        except OSError:
            logger.debug("a scoring process died before its next call")  # The reader sees the same and reports it.

    def give_up(self, failure: Failure) -> None:
        """It never became ready."""
        self.kill()
        self.start_failure = failure

    def end(self, outcome: Any) -> None:
        future, self.future = self.future, None
        if future is not None:
            future.set_result(outcome)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # Dead already, with all it had started.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def last_words(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        words = self.printed()
        return f"the scoring process died ({how})." + (f" It had printed:\n{words}" if words else "")

    def printed(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
