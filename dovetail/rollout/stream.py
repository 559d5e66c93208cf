"""Requests in, results as they finish: one consumer's view of an engine. Knows no engine."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dovetail.observability.progress import note_progress

if TYPE_CHECKING:
    from dovetail.rollout.base import GenerationRequest, GenerationResult, RolloutEngine


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that cannot be finished, and why. Other requests go on."""

    request_id: str
    error: BaseException


def check_new_ids(new: Collection[str], running: Collection[str]) -> None:
    """ValueError for a request id that comes twice, or that a running request has."""
    repeated = [name for name, count in Counter(new).items() if count > 1 or name in running]
    if repeated:
        raise ValueError(f"request_id {repeated[0]!r} is in use; ids of running requests must be unique.")


class EngineStream:
    """Requests of one consumer. `submit` and `results` may be called from different threads.

    An engine that lives in this process makes progress while some thread waits in `wait`, `results` or `drain`, of this
    stream or of another one.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._left: dict[str, int] = {}  # samples of each request that have not finished
        self._finished: deque[GenerationResult] = deque()
        self._failures: dict[str, BaseException] = {}  # by request id
        self._lock = threading.Lock()  # of the three above
        self._closed = False

    @property
    def num_running(self) -> int:
        """Samples that were submitted and have not finished."""
        with self._lock:
            return sum(self._left.values())

    def submit(self, *requests: GenerationRequest) -> None:
        """Join the running batch at the next step. All requests are checked before any is added."""
        if self._closed:
            raise ValueError("this stream is closed; open a new one.")
        ids = [request.request_id for request in requests]
        with self._lock:
            check_new_ids(ids, self._left)
            self._left.update((request.request_id, request.sampling.n) for request in requests)
        try:
            self._engine.enqueue(requests, self._deliver)
        except BaseException:
            with self._lock:
                for name in ids:
                    self._left.pop(name, None)
                    self._failures.pop(name, None)  # reported here
            raise

    def results(self, timeout: float | None = None) -> list[GenerationResult]:
        """What has finished since the last call, after a `wait`."""
        self.wait(timeout)
        return self.take_finished()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for at least one result while any request is running, at most `timeout` seconds.

        Raises the error of a request of this stream that cannot be finished; the others go on.
        """
        self._engine.wait(lambda: bool(self._finished or self._failures) or not self._left, timeout)
        self._raise_failure()

    def drain(self, timeout: float | None = None) -> list[GenerationResult]:
        """Wait for every request, then everything that `results` has not returned yet. Raises as `results` does."""
        self._engine.wait(lambda: bool(self._failures) or not self._left, timeout)
        self._raise_failure()
        with self._lock:
            unfinished = sorted(self._left)
        if unfinished:
            raise TimeoutError(
                f"{len(unfinished)} requests did not finish in {timeout} s, the first of them {unfinished[0]!r}."
            )
        return self.take_finished()

    def take_finished(self) -> list[GenerationResult]:
        """What has finished since the last call, without waiting."""
        with self._lock:
            taken = list(self._finished)
            self._finished.clear()
        return taken

    def partial(self) -> list[GenerationResult]:
        """What the running requests of this stream have generated so far; they go on."""
        return self._engine.partial(self._running_ids())

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests of this stream (all when None) with what they have; their results are delivered."""
        mine = self._running_ids() if request_ids is None else self._running_ids() & set(request_ids)
        return self._engine.abort(mine) if mine else 0

    def end_session(self, session: str) -> None:
        """No request of this session follows."""
        self._engine.end_session(session)

    def close(self) -> None:
        """Abort what is running. Results that were not taken are dropped."""
        self._closed = True
        self.abort()
        self._finished.clear()
        self._failures.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running_ids(self) -> set[str]:
        with self._lock:
            return set(self._left)

    def _deliver(self, outcome: GenerationResult | FailedRequest) -> None:
        with self._lock:
            if outcome.request_id not in self._left:
                return  # another sample of the request failed
            if isinstance(outcome, FailedRequest):
                self._failures.setdefault(outcome.request_id, outcome.error)
                return
            note_progress()
            self._finished.append(outcome)
            self._left[outcome.request_id] -= 1
            if not self._left[outcome.request_id]:
                del self._left[outcome.request_id]

    def _raise_failure(self) -> None:
        with self._lock:
            if not self._failures:
                return
            name, error = self._failures.popitem()
            self._left.pop(name, None)
        self._engine.abort([name])  # its other samples
        raise error
