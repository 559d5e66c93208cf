"""Where groups are generated: on the trainer's devices, in turns with it, or on engines of their own that never stop.

Which draws start and which a step takes is `RolloutStream`'s. Knows no pace, no ledger and no score.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dovetail.controller import WorkerGroup
from dovetail.controller.errors import WorkerError
from dovetail.protocol import DataProto
from dovetail.trainer.engines import SeparateEngines

_POLL_S = 0.2
"""How long an engine holds a question for finished groups; also how often the waits are looked at."""
_SNAPSHOT_S = 15.0
"""How often tokens of unfinished responses are fetched from engines of their own: what a dead engine loses at most."""
_LOOKS_PER_STALL = 4
"""New tokens are counted at the same time, more often where a stall is to be named sooner."""


@dataclass(eq=False)
class Draw:
    """A prompt on its way. `version` is that of the weights it started with, later that of its oldest token."""

    number: int
    prompt: DataProto
    engine: int
    version: int
    rows: DataProto | None = None
    newest: int = 0
    """Version of its newest token, once it is finished."""

    @property
    def uid(self) -> str:
        return draw_uid(self.number)


class Generator(ABC):
    """Where groups are generated."""

    @property
    @abstractmethod
    def num_engines(self) -> int: ...

    @abstractmethod
    def start(self, request: DataProto, snapshot: DataProto | None) -> None:
        """Begin; with `snapshot` from what it holds."""

    @abstractmethod
    def advance(self, *, missing: Sequence[int], must_finish: Sequence[str]) -> list[DataProto]:
        """Generate, or wait for a while; returns what has finished. `missing[e]` groups of engine e would be enough."""

    def collect(self) -> list[DataProto]:
        """What has finished without waiting for it. Replaces no engine, so the trainer may be busy meanwhile."""
        return []

    @abstractmethod
    def snapshot(self) -> DataProto | None:
        """What unfinished groups have so far."""

    @abstractmethod
    def abort(self, uids: Sequence[str]) -> None: ...

    @abstractmethod
    def take_weights(self, version: int) -> dict[str, float]:
        """The trainer's weights have this version now; returns metrics."""

    def activity(self) -> list[list[tuple[str, float, float]]]:
        """What each engine of its own did since the last call: `(what, start, end)`."""
        return []

    def tool_calls(self) -> dict[str, tuple[str, float]]:
        """Of groups that wait for a tool: its name, and since when by the monotonic clock."""
        return {}

    def lost(self) -> bool:
        """Whether what was running is gone and has to be started again; asking resets it."""
        return False

    def last_progress(self) -> float:
        """When tokens were last seen to be generated, by the monotonic clock."""
        return time.monotonic()


class OnTrainerDevices(Generator):
    """Engine and trainer take turns: generation stops as soon as a step has its groups, the others go on later."""

    def __init__(self, group: WorkerGroup, max_in_flight: int) -> None:
        self._group = group
        self._max_begun = math.ceil(max_in_flight / self.num_engines)
        self._waiting: tuple[DataProto, DataProto | None] | None = None
        self._version = 0

    @property
    def num_engines(self) -> int:
        return self._group.dp_size("rollout")

    def start(self, request: DataProto, snapshot: DataProto | None) -> None:
        if self._waiting is not None:  # several chunks start together
            earlier, known = self._waiting
            request = DataProto.concat([earlier, request])
            snapshot = known if snapshot is None else snapshot
        self._waiting = request, snapshot

    def advance(self, *, missing: Sequence[int], must_finish: Sequence[str]) -> list[DataProto]:
        request, snapshot = self._waiting or (None, None)
        self._waiting = None
        parts = self._group.generate_groups(
            request, snapshot, list(missing), list(must_finish), self._max_begun, self._version
        )
        return [part for part in parts if part is not None]

    def snapshot(self) -> DataProto | None:
        return joined([*self._group.snapshot_groups(), self._waiting[1] if self._waiting else None])

    def abort(self, uids: Sequence[str]) -> None:
        self._group.abort_groups(list(uids))
        if self._waiting is not None:
            request, snapshot = self._waiting
            left = rows_of(request, set(request.non_tensor_batch["uid"]) - set(uids))
            self._waiting = None if left is None else (left, snapshot)

    def take_weights(self, version: int) -> dict[str, float]:
        self._version = version
        return {}


class OnOwnDevices(Generator):
    """Engines that never stop. One that dies is replaced, and its responses go on from the tokens seen last."""

    def __init__(self, engines: SeparateEngines, stall_timeout_s: float) -> None:
        self._engines = engines
        self._snapshot_s = min(_SNAPSHOT_S, stall_timeout_s / _LOOKS_PER_STALL or _SNAPSHOT_S)
        self._known_restarts = engines.num_restarts
        self._seen: DataProto | None = None
        self._num_tokens: list[int] = []
        self._tool_calls: dict[str, tuple[str, float]] = {}
        self._seen_at = self._progress_at = time.monotonic()

    @property
    def num_engines(self) -> int:
        return self._engines.group.dp_size("rollout")

    def start(self, request: DataProto, snapshot: DataProto | None) -> None:
        self._seen = snapshot or self._seen
        known = rows_of(self._seen, request.non_tensor_batch["uid"])
        self._call(lambda group: group.submit_groups(request, known))

    def advance(self, *, missing: Sequence[int], must_finish: Sequence[str]) -> list[DataProto]:
        finished = self._call(lambda group: self._finished(group.take_groups(_POLL_S))) or []
        if self._needs_snapshot():
            self.snapshot()
        return finished

    def collect(self) -> list[DataProto]:
        finished: list[DataProto] = []
        with suppress(WorkerError):  # the next call that may replace the engines meets it again
            group = self._engines.group
            finished = self._finished(group.take_groups(0.0))
            if self._needs_snapshot():
                self._look(group)
        return finished

    def snapshot(self) -> DataProto | None:
        self._call(self._look)
        return self._seen

    def _finished(self, parts: Sequence[DataProto | None]) -> list[DataProto]:
        finished = [part for part in parts if part is not None]
        if finished:
            self._progress_at = time.monotonic()
        return finished

    def _needs_snapshot(self) -> bool:
        return time.monotonic() - self._seen_at > self._snapshot_s

    def _look(self, group: WorkerGroup) -> None:
        parts, num_tokens, calls = group.snapshot_groups(), group.num_tokens(), group.tool_calls()
        if self._has_restarted:
            return  # new engines have nothing yet, and go on from what was seen of the old ones
        self._seen, self._seen_at = joined(parts), time.monotonic()
        self._tool_calls = {
            uid: (name, self._seen_at - seconds) for part in calls for uid, (name, seconds) in part.items()
        }
        if num_tokens != self._num_tokens:
            self._num_tokens, self._progress_at = num_tokens, self._seen_at

    def last_progress(self) -> float:
        return self._progress_at

    def tool_calls(self) -> dict[str, tuple[str, float]]:
        return self._tool_calls

    def abort(self, uids: Sequence[str]) -> None:
        self._call(lambda group: group.abort_groups(list(uids)))

    def take_weights(self, version: int) -> dict[str, float]:
        self._engines.weights_changed(version)
        start = time.perf_counter()
        held = self._engines.bring_up_to_date()
        return {"async/weight_sync_s": time.perf_counter() - start, "async/generation_held_s": held}

    def activity(self) -> list[list[tuple[str, float, float]]]:
        return self._call(lambda group: group.take_activity()) or []

    def lost(self) -> bool:
        has_restarted, self._known_restarts = self._has_restarted, self._engines.num_restarts
        return has_restarted

    @property
    def _has_restarted(self) -> bool:
        return self._known_restarts != self._engines.num_restarts

    def _call(self, work: Callable[[WorkerGroup], Any]) -> Any:
        """None after a death: the engines are up again, and `lost` says so."""
        try:
            return work(self._engines.group)
        except WorkerError as error:
            self._engines.recover(error)
            return None


def draw_uid(number: int) -> str:
    return f"draw-{number}"


def draw_number(uid: str) -> int:
    return int(str(uid).removeprefix("draw-"))


def rows_of(batch: DataProto | None, uids: Iterable[str]) -> DataProto | None:
    """The rows of these groups; None where there are none."""
    wanted = set(uids)
    rows = [] if batch is None else [row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in wanted]
    return batch.select_idxs(rows) if batch is not None and rows else None


def joined(parts: Sequence[DataProto | None]) -> DataProto | None:
    there = [part for part in parts if part is not None]
    return DataProto.concat(there) if there else None
