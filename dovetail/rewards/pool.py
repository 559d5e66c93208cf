"""A small pool of processes that can be killed. One call at a time each, a time limit per call, dead ones replaced.

Knows nothing of batches. Processes are started as a fresh interpreter (no fork of a threaded driver, no second import
of the user's main script) in a group of their own, so that a kill also reaches what a reward function has started.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any

from dovetail.rewards.decoding import DecoderSource
from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import FunctionSpec, StartMessage
from dovetail.rewards.worker_handle import START_SECONDS, WorkerHandle


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
        timeout_key: str = "reward_model.timeout_seconds",
    ) -> None:
        self._start_message = StartMessage(list(sys.path), tuple(specs), is_batch, tuple(import_modules), decoder)
        self._timeout_key = timeout_key
        self._cancelled: set[Future[Any]] = set()
        self._timeout = timeout_seconds
        self._waiting: collections.deque[tuple[Any, Future[Any]]] = collections.deque()
        self._lock = threading.Lock()
        self._closing = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._workers = [self._start_worker() for _ in range(num_workers)]
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
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def pids(self) -> list[int]:
        """Process ids, for those who want to look."""
        return [worker.process.pid for worker in self._workers]

    def _wake(self) -> None:
        # A pipe full of wake-ups: one more says nothing new.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def _start_worker(self) -> WorkerHandle:
        return WorkerHandle(self._start_message)

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
                self._workers[index] = self._start_worker()

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
            self._replace(worker, Failure("timeout", self._timeout_message(worker)))
        else:
            worker.give_up(Failure("timeout", f"a new scoring process did not start within {START_SECONDS:g} s."))

    def _replace(self, worker: WorkerHandle, failure: Failure) -> None:
        worker.kill()
        worker.end(failure)
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _timeout_message(self, worker: WorkerHandle) -> str:
        words = worker.printed()
        seen = f" It had printed:\n{words}" if words else ""
        return f"the reward function ran longer than {self._timeout_key}={self._timeout:g} and was killed.{seen}"

    def _stop_workers(self, failure: Failure) -> None:
        for worker in self._workers:
            worker.kill()
            worker.end(failure)
