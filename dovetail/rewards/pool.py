"""A small pool of processes that can be killed. One call at a time each, a time limit per call, dead ones replaced.

Knows nothing of batches. Processes are started as a fresh interpreter (no fork of a threaded driver, no second import
of the user's main script) in a group of their own, so that a kill also reaches what a reward function has started.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from dovetail.rewards.decoding import DecoderSource
from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import FunctionSpec, StartMessage

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
MESSAGE_SECONDS = 30
_LOG_LIMIT = 1 << 20
_TAIL = 4000


class WorkerHandle:
    """One process, its socket, and the call it is busy with."""

    def __init__(self, start_message: IO[bytes]) -> None:
        ours, theirs = socket.socketpair()
        # What the function prints goes here, not into the driver's console; the end of it explains a crash.
        self.log: IO[bytes] = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115  lives as long as the worker
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dovetail.rewards.worker_process",
                str(theirs.fileno()),
                str(start_message.fileno()),
            ],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            pass_fds=(theirs.fileno(), start_message.fileno()),
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        # One thread serves all processes: it waits this long for one that is stopped in the middle of a message.
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", MESSAGE_SECONDS, 0))
        self.connection = Connection(ours.detach())
        self.is_ready = False
        self.start_failure: Failure | None = None
        self.future: Future[Any] | None = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_active(self) -> bool:
        """Whether something is expected from it: that it is ready, or a result."""
        return self.start_failure is None and (not self.is_ready or self.future is not None)

    def receive(self) -> tuple[str, Any]:
        # Unpickling runs code of the sender's choice. The sender is a process of ours that runs the user's own reward
        # function; programs that a model wrote run in yet another process, and only their output is read (`sandbox`).
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
            last_line = (value.strip().splitlines() or [""])[-1]
            raise RewardError(f"the reward function cannot be used. {last_line}\n{value}")
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


class KillablePool:
    """Runs reward functions. `submit` never blocks and never raises for what a function does.

    A future gives the function's columns (a list of them in batch mode), or a `Failure`.
    """

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        *,
        num_workers: int,
        timeout_seconds: float,
        is_batch: bool = False,
        import_modules: Sequence[str] = (),
        decoder: DecoderSource | None = None,
        columns: tuple[str, ...] | None = None,
        timeout_key: str = "reward_model.timeout_seconds",
    ) -> None:
        start = StartMessage(list(sys.path), tuple(specs), is_batch, tuple(import_modules), decoder, columns)
        # A file, not the socket: it may hold a whole tokenizer, and sending it would wait for each process in turn.
        self._start_message = tempfile.TemporaryFile()  # noqa: SIM115  read by every process that is started
        pickle.dump(start, self._start_message, protocol=5)
        self._start_message.flush()
        self._timeout_key = timeout_key
        self._cancelled: set[Future[Any]] = set()
        self._timeout = timeout_seconds
        self._waiting: collections.deque[tuple[Any, Future[Any]]] = collections.deque()
        self._lock = threading.Lock()
        self._closing = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._workers = [WorkerHandle(self._start_message) for _ in range(num_workers)]
        try:
            for worker in self._workers:
                worker.wait_until_ready(time.monotonic() + START_SECONDS)
        except RewardError as error:
            self._stop_workers(Failure("crash", str(error)))
            raise
        self._thread = threading.Thread(target=self._serve, daemon=True, name="reward-pool")
        self._thread.start()

    def submit(self, call: Mapping[str, Any]) -> Future[Any]:
        """Queue one call."""
        return self.submit_message(pickle.dumps(call, protocol=5))

    def submit_message(self, message: bytes) -> Future[Any]:
        """Queue one call that is pickled already."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closing:
                raise RewardError("the scoring processes have been stopped; make a new runner.")
            self._waiting.append((message, future))
        self._wake()
        return future

    def cancel(self, futures: Iterable[Future[Any]]) -> None:
        """Give these calls up: those that wait never start, the processes of those that run are killed."""
        with self._lock:
            self._cancelled.update(future for future in futures if not future.done())
        self._wake()

    def close(self) -> None:
        """Kill every process; calls that have not ended fail. A second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join()
        self._start_message.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def pids(self) -> list[int]:
        """Process ids, for those who want to look."""
        return [worker.process.pid for worker in self._workers]

    def _wake(self) -> None:
        # A pipe full of wake-ups: one more says nothing new.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def _serve(self) -> None:
        """The pool's own thread. Whatever ends it, no future is left without a result."""
        reason = "the scoring processes were stopped."
        try:
            while not self._closing:
                self._turn()
        except BaseException:
            reason = f"the pool of scoring processes broke:\n{traceback.format_exc()}"
            raise
        finally:
            with self._lock:
                self._closing = True
                left, self._waiting = list(self._waiting), collections.deque()
            self._stop_workers(Failure("crash", reason))
            for _, future in left:
                future.set_result(Failure("crash", reason))

    def _turn(self) -> None:
        """Hand out calls, wait for something to happen, collect replies, kill what runs too long."""
        self._give_up_cancelled()
        self._hand_out()
        active = [worker for worker in self._workers if worker.is_active]
        deadline = min((worker.deadline for worker in active), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([self._wake_reader, *(worker.connection for worker in active)], timeout)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        for worker in active:
            if worker.connection in ready:
                self._collect(worker)
            elif time.monotonic() >= worker.deadline:
                self._time_out(worker)

    def _give_up_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            if not cancelled:
                return
            waiting, self._waiting = self._waiting, collections.deque()
            self._waiting.extend(entry for entry in waiting if entry[1] not in cancelled)
        given_up = Failure("cancelled", "the batch was given up before this answer was scored.")
        for _, future in waiting:
            if future in cancelled:
                future.set_result(given_up)
        for worker in list(self._workers):
            if worker.future in cancelled:
                self._replace(worker, given_up)

    def _hand_out(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.is_active:
                continue
            with self._lock:
                if not self._waiting:
                    return
                message, future = self._waiting.popleft()
            if worker.start_failure is None:
                worker.begin(message, future, self._timeout)
            else:
                # A replacement that cannot start fails one call per try, so a broken machine ends in an error, not in
                # a loop.
                future.set_result(worker.start_failure)
                self._workers[index] = WorkerHandle(self._start_message)

    def _collect(self, worker: WorkerHandle) -> None:
        try:
            kind, value = worker.receive()
        except (EOFError, OSError):
            failure = Failure("crash", worker.last_words())
            self._replace(worker, failure) if worker.is_ready else worker.give_up(failure)
            return
        if kind == "ready":
            worker.is_ready = True
        elif not worker.is_ready:
            worker.give_up(Failure("crash", f"a new scoring process could not start:\n{value}"))
        else:
            worker.end(value if kind == "result" else Failure("exception", value))

    def _time_out(self, worker: WorkerHandle) -> None:
        if worker.is_ready:
            seen = f" It had printed:\n{words}" if (words := worker.printed()) else ""
            why = f"the reward function ran longer than {self._timeout_key}={self._timeout:g} and was killed.{seen}"
            self._replace(worker, Failure("timeout", why))
        else:
            worker.give_up(Failure("timeout", f"a new scoring process did not start within {START_SECONDS:g} s."))

    def _replace(self, worker: WorkerHandle, failure: Failure) -> None:
        worker.kill()
        worker.end(failure)
        self._workers[self._workers.index(worker)] = WorkerHandle(self._start_message)

    def _stop_workers(self, failure: Failure) -> None:
        for worker in self._workers:
            worker.kill()
            worker.end(failure)
