"""`GroupScores`: groups are scored as soon as they are finished, while others are generated or the trainer updates.

Kept here is what the reward function gave for each row. What depends on the other rows of a batch (shaping, the share
of failures, metrics) waits until a step takes them, so scores are the same whenever they were made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from dovetail.observability.stalls import Waits
from dovetail.protocol import DataProto

StartScoring = Callable[[DataProto], Sequence[Future[Any]]]
"""One future for each row: columns of the reward, or a `Failure`."""


class GroupScores:
    """By draw. Without `start` nothing is scored early, and nobody waits for it.

    `time_limit_s` is the longest that one row may take: then it has failed, and the run goes on without it.
    """

    def __init__(self, start: StartScoring | None, *, time_limit_s: float = 0.0) -> None:
        self._start = start
        self._time_limit_s = time_limit_s
        self._futures: dict[int, Sequence[Future[Any]]] = {}
        self._started_at: dict[int, float] = {}
        self._progress_at = 0.0

    def start(self, draw: int, rows: DataProto) -> None:
        if self._start is not None and draw not in self._futures:
            self._futures[draw] = self._start(rows)
            self._started_at[draw] = time.monotonic()
            for future in self._futures[draw]:
                future.add_done_callback(self._note_progress)

    def are_done(self, draw: int) -> bool:
        return all(future.done() for future in self._futures.get(draw, ()))

    def of(self, draws: Iterable[int]) -> list[Future[Any]] | None:
        """Of all rows of these draws; None when they have to be scored as a batch."""
        if self._start is None:
            return None
        return [future for draw in draws for future in self._futures[draw]]

    def forget(self, draws: Iterable[int]) -> None:
        for draw in draws:
            self._futures.pop(draw, None)
            self._started_at.pop(draw, None)

    def wait(self, timeout_s: float) -> bool:
        """Until a row is scored, but no longer; whether one was."""
        unfinished = [future for futures in self._futures.values() for future in futures if not future.done()]
        return bool(unfinished and wait(unfinished, timeout_s, FIRST_COMPLETED).done)

    def watch(self, waits: Waits, draws: Iterable[int], wait_began: float, stall_timeout_s: float) -> None:
        """The trainer waits for these draws: name those whose score is not there."""
        # A row that hangs fails at its own time limit. Where that is not later than a stall, only what outlives it is.
        limit = self._time_limit_s if self._time_limit_s <= stall_timeout_s else 0.0
        for draw in draws:
            if not self.are_done(draw):
                since = max(self._started_at[draw], self._progress_at) + limit
                waits.waiting("the trainer", f"draw {draw}", since=wait_began)
                waits.waiting(f"draw {draw}", "its score", since=since)

    def packed(self, draws: Iterable[int]) -> DataProto | None:
        """What a checkpoint keeps. What is unfinished, has failed or cannot be read back as it was is scored again."""
        texts = {draw: _packed(self._futures[draw]) for draw in draws if draw in self._futures and self.are_done(draw)}
        kept = [(draw, text) for draw, text in texts.items() if text is not None]
        if not kept:
            return None
        numbers = np.array([draw for draw, _ in kept], dtype=np.int64)
        return DataProto.from_dict(
            non_tensors={"draw": numbers, "scores": np.array([text for _, text in kept], dtype=object)}
        )

    def unpack(self, packed: DataProto) -> None:
        if self._start is None:
            return
        columns = packed.non_tensor_batch
        for draw, text in zip(columns["draw"].tolist(), columns["scores"], strict=True):
            outcomes = json.loads(text)
            if all(isinstance(outcome, dict) for outcome in outcomes):  # older checkpoints keep failures, as lists
                self._futures[draw] = [_done(outcome) for outcome in outcomes]
                self._started_at[draw] = time.monotonic()

    def _note_progress(self, _: Future[Any]) -> None:
        self._progress_at = time.monotonic()


def _packed(futures: Sequence[Future[Any]]) -> str | None:
    outcomes = [future.result() for future in futures]
    try:
        text = json.dumps(outcomes)
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == outcomes else None


def _done(outcome: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(outcome)
    return future
