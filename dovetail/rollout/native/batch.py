"""The running batch: turns the scheduler's decisions into model steps and books their tokens. One thread at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from dovetail.rollout.native.images import prefill_images, prefill_positions
from dovetail.rollout.native.kv_cache import SlotKVCache
from dovetail.rollout.native.runner import ModelRunner
from dovetail.rollout.native.sampler import SamplingRows
from dovetail.rollout.native.scheduler import Sample, Scheduler

# Room given to a sequence before its real length is known; short responses never pay for a long limit.
_FIRST_ROOM = 256


@dataclass(slots=True)
class BatchStats:
    """Counts since the engine was built."""

    prefill_steps: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0


class Batch(Protocol):
    """What the engine asks of a running batch. Every call but the counts waits for no step and is made between two."""

    stats: BatchStats

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def kv_cache_bytes(self) -> int: ...

    def add(self, samples: Iterable[Sample]) -> None: ...

    def abort(self, request_ids: Collection[str] | None) -> int: ...

    def drain(self) -> None:
        """Return once the device has nothing left to do and every generated token is booked."""

    def forget_cache(self, *, keep_decoding: bool = False) -> None:
        """Old entries must not be read again; running samples are prefilled anew before their next token, short ones
        first. With `keep_decoding` those that decode already go on with their old entries, which no others read."""

    def free_cache(self) -> None:
        """Forget the cache and give its memory back."""

    def step(self, version: int) -> bool:
        """Some progress on every running sample; True if a response was finished."""
        ...


class RunningBatch:
    """A batch over dense slots, for CPU."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, max_num_seqs: int, max_prefill_tokens: int
    ) -> None:
        self.cache = SlotKVCache()
        self.scheduler = Scheduler(max_num_seqs, max_prefill_tokens, self.cache.copy)
        self.stats = BatchStats()
        self._runner = ModelRunner(model, self.cache, device)
        self._device = device
        self._rows_changed = True
        self._shifts: list[int] = []

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return sum(row.finish_reason is None for row in list(self.scheduler.rows))

    @property
    def kv_cache_bytes(self) -> int:
        return self.cache.nbytes

    def add(self, samples: Iterable[Sample]) -> None:
        self.scheduler.add(samples)

    def abort(self, request_ids: Collection[str] | None) -> int:
        return self.scheduler.abort(request_ids)

    def drain(self) -> None:
        """Every step is booked before it returns."""

    def free_cache(self) -> None:
        self.forget_cache()
        self.cache.free()

    def forget_cache(self, *, keep_decoding: bool = False) -> None:
        self.scheduler.forget_cache(keep_decoding=keep_decoding)
        if not keep_decoding:
            self.cache.clear()
        self._rows_changed = True

    def step(self, version: int) -> bool:
        """One prefill step if any row needs it, else one token for every row; True if a response was finished."""
        if self.scheduler.refill():
            self._rows_changed = True
        if self._prefill():
            return False
        return self._decode(version)

    def _prefill(self) -> bool:
        plan = self.scheduler.plan_prefill()
        if not plan:
            return False
        self._reserve()
        tokens = [token for row, segment in plan for token in row.sequence[segment.start : segment.end]]
        self._runner.prefill(
            [segment for _, segment in plan],
            tokens,
            prefill_positions(plan, self._device),
            prefill_images(plan, self._device),
        )
        for row, segment in plan:
            row.num_cached = segment.end
        self.stats.prefill_steps += 1
        self.stats.prefill_tokens += len(tokens)
        return True

    def _decode(self, version: int) -> bool:
        rows = self.scheduler.rows
        if not rows:
            return False
        self._reserve()
        lengths = [row.num_cached for row in rows]
        if self._rows_changed:
            sampling = SamplingRows.build(
                [row.request.sampling for row in rows],
                [row.seed for row in rows],
                [row.index for row in rows],
                self._device,
            )
            self._runner.set_rows(sampling, lengths)
            self._shifts = [row.position_shift for row in rows]
            self._rows_changed = False
        tokens, log_probs = self._runner.decode([row.sequence[-1] for row in rows], lengths, self._shifts)
        any_finished = False
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            row.num_cached += 1
            row.append(token, log_prob, version)
            any_finished |= row.finish_reason is not None
        self.stats.decode_steps += 1
        self.stats.decode_tokens += len(rows)
        return any_finished

    def _reserve(self) -> None:
        rows = self.scheduler.rows
        needed = max(row.num_needed for row in rows) + 1
        if needed > self.cache.capacity or len(rows) > self.cache.num_slots:
            room = max(needed, min(max(row.max_length for row in rows), max(_FIRST_ROOM, needed + needed // 2)))
            self.cache.reserve(len(rows), room)
