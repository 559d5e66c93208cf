"""A small pool of processes that can be killed. A time limit per call, dead ones replaced.

One call at a time each; of coroutine functions as many as `async_calls`, each with its own limit. Which of several
calls has brought a process to a stop or killed it is not known: each is made once more, alone. Knows no batches.
Processes are started as a fresh interpreter (no fork of a threaded driver, no second import of the user's main script)
in a group of their own, so that a kill also reaches what a reward function has started.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from dovetail.rewards.decoding import DecoderSource
from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import NUMBER, FunctionSpec, StartMessage

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
MESSAGE_SECONDS = 30
GRACE_SECONDS = 5.0
"""What an event loop has beyond a call's limit to end that call by itself."""
_LOG_LIMIT = 1 << 20
_TAIL = 4000


@dataclass(eq=False)
class PoolCall:
    """A pickled call. `is_alone`: it shared a process that had to be killed, and shares none from now on."""

    message: bytes
    future: Future[Any]
    is_alone: bool = False


class WorkerHandle:
    """One process, its socket, and the calls it is busy with."""

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
        self.slots = 1
        self.calls: dict[int, PoolCall] = {}
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_active(self) -> bool:
        """Whether something is expected from it: that it is ready, or a result."""
        return self.start_failure is None and (not self.is_ready or bool(self.calls))

    @property
    def has_room(self) -> bool:
        is_shared = not any(call.is_alone for call in self.calls.values())
        return self.start_failure is None and self.is_ready and is_shared and len(self.calls) < self.slots

    def receive(self) -> tuple[int, str, Any]:
        # Unpickling runs code of the sender's choice. The sender is a process of ours that runs the user's own reward
        # function; programs that a model wrote run in yet another process, and only their output is read (`sandbox`).
        message = self.connection.recv_bytes()
        (number,) = NUMBER.unpack_from(message)
        try:
            return number, *pickle.loads(memoryview(message)[NUMBER.size :])
        except Exception:  # noqa: BLE001  the process boundary: a value of a type that only the other side knows
            return number, "exception", f"the result cannot be read here:\n{traceback.format_exc()}"

    def wait_until_ready(self, deadline: float) -> None:
        """Block until the functions are loaded; what goes wrong there is an error before anything is trained."""
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise RewardError(f"a scoring process did not start within {START_SECONDS:g} s. {self.printed()}")
        try:
            _, kind, value = self.receive()
        except (EOFError, OSError):
            raise RewardError(f"a scoring process died while it started: {self.last_words()}") from None
        if kind == "unusable":
            raise RewardError(value)
        if kind != "ready":
            last_line = (value.strip().splitlines() or [""])[-1]
            raise RewardError(f"the reward function cannot be used. {last_line}\n{value}")
        self.is_ready, self.slots = True, value

    def begin(self, number: int, call: PoolCall, timeout: float) -> None:
        if os.fstat(self.log.fileno()).st_size > _LOG_LIMIT:
            os.ftruncate(self.log.fileno(), 0)
        if not self.calls:
            self.expect(timeout)
        self.calls[number] = call
        try:
            self.connection.send_bytes(NUMBER.pack(number) + call.message)
        except OSError:
            logger.debug("a scoring process died before its next call")  # The reader sees the same and reports it.

    def expect(self, timeout: float) -> None:
        """A sign of life: the next one is due when a call that begins now has run into its limit."""
        self.deadline = time.monotonic() + timeout + (GRACE_SECONDS if self.slots > 1 else 0.0)

    def give_up(self, failure: Failure) -> None:
        """It never became ready."""
        self.kill()
        self.start_failure = failure

    def end(self, number: int, outcome: Any) -> None:
        if (call := self.calls.pop(number, None)) is not None:
            call.future.set_result(outcome)

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
        async_calls: int = 1,
    ) -> None:
        """`async_calls`: calls at a time in each process, where all functions are coroutine functions."""
        start = StartMessage(
            list(sys.path),
            tuple(specs),
            is_batch,
            tuple(import_modules),
            decoder,
            columns,
            async_calls=async_calls,
            timeout_seconds=timeout_seconds,
        )
        # A file, not the socket: it may hold a whole tokenizer, and sending it would wait for each process in turn.
        self._start_message = tempfile.TemporaryFile()  # noqa: SIM115  read by every process that is started
        pickle.dump(start, self._start_message, protocol=5)
        self._start_message.flush()
        self._timeout_key = timeout_key
        self._cancelled: set[Future[Any]] = set()
        self._timeout = timeout_seconds
        self._waiting: collections.deque[PoolCall] = collections.deque()
        self._numbers = itertools.count(1)
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

    @property
    def calls_each(self) -> int:
        """Calls that a process takes at a time."""
        return self._workers[0].slots

    def submit(self, call: Mapping[str, Any]) -> Future[Any]:
        """Queue one call."""
        return self.submit_message(pickle.dumps(call, protocol=5))

    def submit_message(self, message: bytes) -> Future[Any]:
        """Queue one call that is pickled already."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closing:
                raise RewardError("the scoring processes have been stopped; make a new runner.")
            self._waiting.append(PoolCall(message, future))
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
            for call in left:
                call.future.set_result(Failure("crash", reason))

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
            self._waiting.extend(call for call in waiting if call.future not in cancelled)
        given_up = Failure("cancelled", "the batch was given up before this answer was scored.")
        for call in waiting:
            if call.future in cancelled:
                call.future.set_result(given_up)
        for worker in list(self._workers):
            if numbers := [number for number, call in worker.calls.items() if call.future in cancelled]:
                worker.kill()
                for number in numbers:
                    worker.end(number, given_up)
                self._start_anew(worker)

    def _hand_out(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.start_failure is None:
                continue
            with self._lock:
                if not self._waiting:
                    return
                call = self._waiting.popleft()
            # A replacement that cannot start fails one call per try, so a broken machine ends in an error, not in a
            # loop.
            call.future.set_result(worker.start_failure)
            self._workers[index] = WorkerHandle(self._start_message)
        while free := [worker for worker in self._workers if worker.has_room]:
            worker = min(free, key=lambda worker: len(worker.calls))
            with self._lock:
                if not self._waiting or (self._waiting[0].is_alone and worker.calls):
                    return
                call = self._waiting.popleft()
            worker.begin(next(self._numbers), call, self._timeout)

    def _collect(self, worker: WorkerHandle) -> None:
        try:
            number, kind, value = worker.receive()
        except (EOFError, OSError):
            failure = Failure("crash", worker.last_words())
            self._replace(worker, failure) if worker.is_ready else worker.give_up(failure)
            return
        if kind == "ready":
            worker.is_ready, worker.slots = True, value
        elif not worker.is_ready:
            worker.give_up(Failure("crash", f"a new scoring process could not start:\n{value}"))
        else:
            worker.expect(self._timeout)
            if kind == "timeout":
                worker.end(number, Failure("timeout", self._too_long(worker, "was cancelled")))
            else:
                worker.end(number, value if kind == "result" else Failure("exception", value))

    def _time_out(self, worker: WorkerHandle) -> None:
        if worker.is_ready:
            self._replace(worker, Failure("timeout", self._too_long(worker, "was killed")))
        else:
            worker.give_up(Failure("timeout", f"a new scoring process did not start within {START_SECONDS:g} s."))

    def _too_long(self, worker: WorkerHandle, what: str) -> str:
        seen = f" It had printed:\n{words}" if (words := worker.printed()) else ""
        return f"the reward function ran longer than {self._timeout_key}={self._timeout:g} and {what}.{seen}"

    def _replace(self, worker: WorkerHandle, failure: Failure) -> None:
        """Kill it. The failure is that of its call; of several, none is known to have failed."""
        worker.kill()
        if len(worker.calls) == 1:
            worker.end(next(iter(worker.calls)), failure)
        for call in worker.calls.values():
            call.is_alone = True
        self._start_anew(worker)

    def _start_anew(self, worker: WorkerHandle) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(worker.calls.values()))
        self._workers[self._workers.index(worker)] = WorkerHandle(self._start_message)

    def _stop_workers(self, failure: Failure) -> None:
        for worker in self._workers:
            worker.kill()
            for number in list(worker.calls):
                worker.end(number, failure)
