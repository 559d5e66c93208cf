"""Hand calls to whoever can score: this node's processes, and those of other nodes. One queue, so no node idles.

A call that a lost or silent node held goes back to the front of the queue. Rate limits count here, over all nodes.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.pool import START_SECONDS

_MINUTE = 60.0


@dataclass(frozen=True)
class RateLimits:
    """`None` is no limit. `estimated_tokens` is what one call counts for against `max_tpm`."""

    max_concurrent: int | None = None
    max_rpm: float | None = None
    max_tpm: float | None = None
    estimated_tokens: int = 2000

    def __post_init__(self) -> None:
        if self.max_tpm is not None and self.estimated_tokens > self.max_tpm:
            raise ValueError(
                f"reward_model.estimated_tokens_per_request={self.estimated_tokens} is more than reward_model.max_tpm="
                f"{self.max_tpm:g}: no call could ever start. Raise max_tpm or lower the estimate."
            )

    @property
    def calls_per_minute(self) -> int | None:
        """The tighter of the two limits, in calls; a limit below one call a minute is one call."""
        by_tokens = None if self.max_tpm is None else self.max_tpm // self.estimated_tokens
        limits = [limit for limit in (self.max_rpm, by_tokens) if limit is not None]
        return max(1, int(min(limits))) if limits else None


@dataclass
class RateLimiter:
    """Counts starts and ends. In any 60 seconds at most `calls_per_minute` calls start."""

    limits: RateLimits
    num_running: int = 0
    _starts: collections.deque[float] = field(default_factory=collections.deque)

    def wait(self, now: float) -> float | None:
        """Seconds until a call may start; 0 is now, None is not before another ends."""
        if self.limits.max_concurrent is not None and self.num_running >= self.limits.max_concurrent:
            return None
        allowed = self.limits.calls_per_minute
        while self._starts and self._starts[0] <= now - _MINUTE:
            self._starts.popleft()
        if allowed is None or len(self._starts) < allowed:
            return 0.0
        return self._starts[0] + _MINUTE - now

    def start(self, now: float) -> None:
        self.num_running += 1
        if self.limits.calls_per_minute is not None:
            self._starts.append(now)

    def end(self) -> None:
        self.num_running -= 1


logger = logging.getLogger(__name__)


class Pool(Protocol):
    """Processes of one node."""

    def submit_message(self, message: bytes) -> Future[Any]: ...

    def cancel(self, futures: Sequence[Future[Any]]) -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Task:
    message: bytes
    future: Future[Any] = field(default_factory=Future)
    deadline: float = float("inf")


@dataclass(eq=False)
class _Target:
    """A pool, how many calls it is given at a time, and those it has. `seconds` is None where the pool keeps time."""

    name: str
    pool: Pool
    slots: int
    seconds: float | None = None
    running: dict[Future[Any], _Task] = field(default_factory=dict)


class ScoringDispatcher:
    """`submit` never blocks. A future gives what the pool gives: columns, or a `Failure`."""

    def __init__(
        self,
        pool: Pool,
        *,
        num_workers: int,
        timeout_seconds: float,
        limits: RateLimits | None = None,
        calls_each: int = 1,
    ) -> None:
        """`calls_each`: calls that a process takes at a time."""
        self._limiter = RateLimiter(limits or RateLimits())
        # One call more than processes keeps them busy; a rate limit counts starts, so nothing may wait in a pool.
        self._ahead = 1 if limits is None else 0
        self._timeout, self._calls_each = timeout_seconds, calls_each
        self._targets = [_Target("this node", pool, num_workers * calls_each + self._ahead)]
        self._queue: collections.deque[_Task] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="reward-dispatch")
        self._thread.start()

    @property
    def calls_at_a_time(self) -> int:
        return sum(target.slots - self._ahead for target in self._targets)

    def add(self, name: str, pool: Pool, num_workers: int) -> None:
        """Score on one more node. Starting a replacement and two calls is the longest a call may take there."""
        target = _Target(name, pool, num_workers * self._calls_each + self._ahead, 2 * (self._timeout + START_SECONDS))
        with self._changed:
            self._targets.append(target)
            self._changed.notify()

    def submit(self, call: Mapping[str, Any]) -> Future[Any]:
        task = _Task(pickle.dumps(call, protocol=5))
        with self._changed:
            if self._closing:
                raise RewardError("the scoring processes have been stopped; make a new runner.")
            self._queue.append(task)
            self._changed.notify()
        return task.future

    def cancel(self, futures: Iterable[Future[Any]]) -> None:
        """Give these calls up, those that run included."""
        wanted = set(futures)
        for future in wanted:  # a task whose future is done never starts, also where its node is lost
            _set(future, Failure("cancelled", "the batch was given up before this answer was scored."))
        with self._changed:
            running = [
                (target.pool, [inner for inner, task in target.running.items() if task.future in wanted])
                for target in self._targets
            ]
        for pool, calls in running:
            if calls:
                pool.cancel(calls)

    def close(self) -> None:
        """Stop every process; calls that have not ended fail. A second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for target in list(self._targets):
            target.pool.close()
        left = [*self._queue, *(task for target in self._targets for task in list(target.running.values()))]
        for task in left:
            _set(task.future, Failure("crash", "the scoring processes were stopped."))

    def _serve(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                self._drop_silent()
                started, pause = self._next_calls()
                if not started:
                    self._changed.wait(pause)
                    continue
            # Outside the lock: a call that has ended at once runs its callback here.
            for target, task in started:
                self._start(target, task)

    def _next_calls(self) -> tuple[list[tuple[_Target, _Task]], float]:
        """Calls that may start now, and how long to wait when there is none."""
        started: list[tuple[_Target, _Task]] = []
        taken = collections.Counter[int]()
        while self._queue:
            if self._queue[0].future.done():  # cancelled
                self._queue.popleft()
                continue
            pause = self._limiter.wait(time.monotonic())
            if pause != 0.0:
                return started, 1.0 if pause is None else min(pause, 1.0)
            target = max(self._targets, key=lambda target: target.slots - len(target.running) - taken[id(target)])
            if target.slots - len(target.running) - taken[id(target)] <= 0:
                break
            taken[id(target)] += 1
            self._limiter.start(time.monotonic())
            started.append((target, self._queue.popleft()))
        return started, 1.0

    def _start(self, target: _Target, task: _Task) -> None:
        if target.seconds is not None:
            task.deadline = time.monotonic() + target.seconds
        try:
            inner = target.pool.submit_message(task.message)
        except Exception as error:  # noqa: BLE001  whatever it is, this thread must go on: others wait for its calls
            with self._changed:
                self._limiter.end()
                if target.seconds is not None:
                    self._queue.appendleft(task)
                    self._lose(target, f"{type(error).__name__}: {error}")
                    return
            _set(task.future, Failure("crash", str(error)))  # this node's own pool was stopped
            return
        with self._changed:
            target.running[inner] = task
            is_cancelled = task.future.done()
        inner.add_done_callback(lambda done: self._ended(target, done))
        if is_cancelled:
            target.pool.cancel([inner])

    def _ended(self, target: _Target, inner: Future[Any]) -> None:
        with self._changed:
            task = target.running.pop(inner, None)
            if task is None:
                return  # given back before, when its node was lost
            self._limiter.end()
            error = inner.exception()
            if error is not None and self._closing:
                self._queue.append(task)
            elif error is not None:
                self._queue.appendleft(task)
                self._lose(target, f"{type(error).__name__}: {error}")
            self._changed.notify()
        if error is None:
            _set(task.future, inner.result())

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for target in list(self._targets):
            if any(task.deadline < now for task in target.running.values()):
                self._lose(target, f"no answer in {target.seconds:g} s")

    def _lose(self, target: _Target, why: str) -> None:
        if target not in self._targets:  # a call that was on its way when the node was lost
            return
        logger.warning("%s no longer scores answers (%s); the others take its calls", target.name, why)
        self._targets.remove(target)
        for task in target.running.values():
            self._limiter.end()
            self._queue.appendleft(task)
        target.running.clear()
        threading.Thread(target=target.pool.close, daemon=True).start()


def _set(future: Future[Any], outcome: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled as it ended
        future.set_result(outcome)
