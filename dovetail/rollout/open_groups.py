"""Groups over one engine's stream: which are open, which may begin, which have finished. Knows not what a group is.

A group is a prompt with its samples, known by its `uid`. Single responses are in `workers.group_stream`, conversations
in `agents.stream`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from dovetail.protocol import DataProto
from dovetail.rollout.base import GenerationResult, RolloutEngine

_IDLE_S = 0.5
"""How long the thread that generates waits for a result before it looks whether it should end."""
_MOST_SPANS = 1024


class Group(Protocol):
    """What `OpenGroups` must know of a group."""

    uid: str

    @property
    def is_finished(self) -> bool: ...


G = TypeVar("G", bound=Group)
H = TypeVar("H")


class OpenGroups(ABC, Generic[G, H]):
    """`start`, `take` and `snapshot` return at once; they may be called while another thread generates.

    `H` is what is kept of a group that the engine has not been given yet.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._stream = engine.open_stream()
        self._changed = threading.Condition()  # of what follows
        self._groups: dict[str, G] = {}  # by uid, in the order in which they came
        self._held: dict[str, H] = {}
        self._finished: list[G] = []  # in the order in which they finished
        self._failure: Exception | None = None
        self._ending = False
        self._busy = _BusySpans()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def start(self, prompts: DataProto, snapshot: DataProto | None = None) -> None:
        """Add groups, a row each, with a `uid`. With a `snapshot`, go on from what it has of these prompts."""

    @abstractmethod
    def take(self) -> DataProto | None:
        """The groups that have finished since the last call, in the order in which they did; None: none has."""

    @abstractmethod
    def snapshot(self) -> DataProto | None:
        """What the groups that were not taken have so far; they go on."""

    def tool_calls(self) -> dict[str, tuple[str, float]]:
        """Of groups that wait for a tool: its name, and for how many seconds."""
        return {}

    @property
    def num_running(self) -> int:
        """Groups that are not finished."""
        with self._changed:
            return len(self._groups)

    def run(self, count: int, must_finish: Sequence[str] = (), *, max_begun: int | None = None) -> None:
        """Generate in this thread until `count` groups have finished, and those of `must_finish`, or nothing is left.

        What is unfinished stays in the engine, which should be paused before its memory is taken away. Beyond
        `max_begun` groups, those that have no token yet are left for later calls: new weights make the cache of every
        group that has begun be computed again.
        """
        wanted = set(must_finish)
        with self._changed:
            begun = [uid for uid, group in self._groups.items() if uid not in self._held or self._has_begun(group)]
            needed = dict.fromkeys([*begun, *(uid for uid in self._groups if uid in wanted)])
            order = list(dict.fromkeys([*needed, *self._groups]))
            room = len(order) if max_begun is None else max(max_begun, count) - len(self._finished)

        def is_enough() -> bool:
            if self._failure is not None:
                raise self._failure
            return not self._groups or (len(self._finished) >= count and not wanted & self._groups.keys())

        self._begin(order[: max(room, len(needed))])
        self._open()
        try:
            self._generate(is_enough)
        finally:
            self._hold()

    def generate_in_background(self) -> None:
        """Generate in a thread until `close`."""
        if self._thread is None:
            self._begin(list(self._held))
            self._open()
            self._thread = threading.Thread(target=self._background, name="groups", daemon=True)
            self._thread.start()

    def take_busy(self) -> list[tuple[float, float]]:
        """When groups were being generated since the last call: start and end in seconds since the epoch."""
        with self._changed:
            return self._busy.take()

    def wait(self, timeout: float) -> None:
        """Return when a group can be taken, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished or self._failure), timeout)

    def abort(self, uids: Sequence[str]) -> None:
        """Forget these groups."""
        with self._changed:
            groups = [group for uid in uids if (group := self._groups.pop(uid, None)) is not None]
            for uid in uids:
                self._held.pop(uid, None)
            self._finished = [group for group in self._finished if group.uid not in uids]
            self._busy.note(bool(self._groups))
        self._cancel(groups)

    def close(self) -> None:
        """End what is running."""
        with self._changed:
            self._ending = True
            groups, self._groups = list(self._groups.values()), {}
            self._changed.notify_all()
        self._cancel(groups)
        self._hold()
        self._stream.close()
        if self._thread is not None:
            self._thread.join(timeout=60)

    # ---- for subclasses ----

    @abstractmethod
    def _begin(self, uids: Sequence[str]) -> None:
        """Begin those of these groups that are still held."""

    @abstractmethod
    def _has_begun(self, group: G) -> bool:
        """Whether a group that is held has tokens, from before it came here. The lock is held."""

    @abstractmethod
    def _deliver(self, results: Sequence[GenerationResult]) -> None:
        """Give results to their groups; calls `_move_finished`. The lock is held."""

    @abstractmethod
    def _cancel(self, groups: Sequence[G]) -> None:
        """End the requests of groups that were forgotten."""

    def _open(self) -> None:
        """The engine generates from here on."""

    def _hold(self) -> None:
        """The engine belongs to somebody else from here on."""

    def _add(self, groups: Sequence[G], held: Mapping[str, H]) -> None:
        with self._changed:
            for group in groups:
                if group.uid in self._groups:
                    raise ValueError(f"group {group.uid!r} is already being generated; uids must be unique.")
            self._groups.update((group.uid, group) for group in groups)
            self._held.update(held)
            self._busy.note(bool(self._groups))
        if self._thread is not None:
            self._begin([group.uid for group in groups])

    def _move_finished(self, groups: Sequence[G]) -> None:
        """Those of these groups that are complete can be taken. The lock is held."""
        complete = [group for group in groups if group.is_finished and self._groups.pop(group.uid, None) is not None]
        for group in complete:
            self._held.pop(group.uid, None)
            self._finished.append(group)
        self._busy.note(bool(self._groups))
        if complete:
            self._changed.notify_all()

    def _take_finished(self) -> list[G]:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            groups, self._finished = self._finished, []
        return groups

    def _fail(self, error: Exception) -> None:
        """Raise this in the thread that takes groups."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _generate(self, is_enough: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if is_enough():
                    return
            self._stream.wait(_IDLE_S)
            with self._changed:
                if not self._receive() and not self._stream.num_running and not is_enough():
                    self._changed.wait(_IDLE_S)

    def _receive(self) -> bool:
        """Deliver what has finished; whether anything had. The lock is held: a result is in the stream or delivered."""
        results = self._stream.take_finished()
        if results:
            self._deliver(results)
        return bool(results)

    def _background(self) -> None:
        try:
            self._generate(lambda: self._ending or self._failure is not None)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that takes results
            self._fail(error)


class _BusySpans:
    """When there was work: spans for a timeline. `note` says whether there may be some. Not locked."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        self._since: float | None = None

    def note(self, is_busy: bool) -> None:
        if is_busy and self._since is None:
            self._since = time.time()
        elif not is_busy and self._since is not None:
            self._spans.append((self._since, time.time()))
            self._since = None

    def take(self) -> list[tuple[float, float]]:
        """Since the last call: start and end in seconds since the epoch."""
        spans, now = list(self._spans), time.time()
        self._spans.clear()
        if self._since is not None:
            spans.append((self._since, now))
            self._since = now
        return spans
