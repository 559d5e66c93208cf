"""What runs next: which samples hold a slot, which wait, what must still be prefilled. Touches no device.

A row is ready to decode when the cache holds everything but its last token; so sampling happens in decode steps only,
and a prompt of P tokens costs one prefill of P - 1 tokens however many samples are drawn from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from dovetail.rollout.base import FinishReason
from dovetail.rollout.native.attention import Segment
from dovetail.rollout.native.kv_cache import SlotKVCache
from dovetail.rollout.response import GrowingResponse, of_requests


@dataclass(eq=False, slots=True)
class Sample(GrowingResponse):
    """Samples of one prompt, of whichever request, share `group`, hence the prompt's cache entries."""

    seed: int
    stop_ids: frozenset[int]
    max_length: int
    group: int
    num_cached: int = 0
    has_old_entries: bool = False
    """Whether older weights computed entries of its cache."""
    positions: torch.Tensor | None = None
    """`[3, prompt]` where images give tokens positions that are not their places."""

    @property
    def position_shift(self) -> int:
        """How far behind its place the position of a token after the prompt is."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]

    def positions_of(self, start: int, end: int, *, num_axes: int) -> torch.Tensor:
        """`[num_axes, end - start]` for these tokens of the sequence."""
        places = torch.arange(start, end).expand(num_axes, -1)
        if self.positions is None:
            return places
        prompt = self.positions[:, start:end]
        return torch.cat([prompt, places[:, prompt.shape[1] :] + self.position_shift], dim=1)

    @property
    def shares_prompt(self) -> bool:
        """Whether its cache entries serve other samples of the prompt."""
        return self.num_cached >= self.num_prompt - 1 and not self.has_old_entries

    @property
    def num_needed(self) -> int:
        """Tokens the cache must hold before the next token can be decoded."""
        return len(self.sequence) - 1

    def extend(
        self,
        token_ids: list[int],
        log_probs: list[float],
        version: int,
        finish_reason: FinishReason | None = None,
        sets: np.ndarray | None = None,
    ) -> None:
        """Add tokens, of which only the last may end the response."""
        if token_ids[-1] in self.stop_ids:
            finish_reason = "stop"
        elif len(self.sequence) + len(token_ids) >= self.max_length:
            finish_reason = "length"
        # super() fails in a class with generated slots
        GrowingResponse.extend(self, token_ids, log_probs, version, finish_reason, sets)


class Scheduler:
    """`rows[i]` is the sample in slot i of `slots`."""

    def __init__(self, num_slots: int, max_prefill_tokens: int, slots: SlotKVCache) -> None:
        self.num_slots = num_slots
        self.max_prefill_tokens = max_prefill_tokens
        self.rows: list[Sample] = []
        self.waiting: deque[Sample] = deque()
        self._slots = slots
        self._ended: set[Sample] = set()  # of sessions that are over, and still in their slots

    @property
    def demand(self) -> tuple[int, int, int]:
        """Before `refill`: the slots it may fill, the longest sequence in them now, and the longest there may be."""
        entering = list(islice(self.waiting, self.num_slots))
        running = sum(row.finish_reason is None for row in self.rows)
        slots = max(len(self.rows), min(self.num_slots, running + len(entering)))
        samples = [*self.rows, *entering]
        needed = max((sample.num_needed + 1 for sample in samples), default=0)
        return slots, needed, max((sample.max_length for sample in samples), default=0)

    def add(self, samples: Iterable[Sample]) -> None:
        self.waiting.extend(samples)

    def refill(self) -> bool:
        """Let waiting samples into free slots and take finished ones out; True if any row changed.

        A newcomer takes the slot of a finished row first: if both drew from the same prompt, its cache entries are
        already there. Slots nobody takes are closed by moving the last row down.
        """
        changed = False
        holders = self._prompt_holders()
        for slot, row in enumerate(self.rows):
            if row.finish_reason is not None and (session := self._session_of(row)) and row not in self._ended:
                self._slots.keep(session, slot, row.sequence[: row.num_cached])
        self._ended = {row for row in self._ended if row.finish_reason is None}
        for slot, row in enumerate(self.rows):
            if row.finish_reason is not None and self.waiting:
                self._enter(slot, holders)
                changed = True
        slot = len(self.rows) - 1
        while slot >= 0:
            if self.rows[slot].finish_reason is not None:
                last = self.rows.pop()
                if slot < len(self.rows):
                    self._slots.copy(len(self.rows), slot, last.num_cached)
                    self.rows[slot] = last
                changed = True
            slot -= 1
        if self.waiting and len(self.rows) < self.num_slots:
            holders = self._prompt_holders()
            changed = True
        while self.waiting and len(self.rows) < self.num_slots:
            self._enter(len(self.rows), holders)
        return changed

    def plan_prefill(self) -> list[tuple[Sample, Segment]]:
        """Segments to prefill now, at most `max_prefill_tokens` tokens; empty when every row can decode.

        Samples of one prompt wait for the first of them, then copy its prompt entries.
        """
        budget = self.max_prefill_tokens
        plan: list[tuple[Sample, Segment]] = []
        filling: set[int] = set()
        holders = self._prompt_holders()
        for slot, row in enumerate(self.rows):
            if row.num_cached >= row.num_needed or budget == 0:
                continue
            self._share_prompt(slot, row, holders)
            shareable = row.num_cached < row.num_prompt - 1
            if row.num_cached >= row.num_needed or (shareable and row.group in filling):
                continue
            length = row.num_needed - row.num_cached
            if length > budget and not (shareable and row.request.multi_modal):
                length = budget
            elif length > budget and plan:
                continue  # the images of a prompt are placed together: it is never cut
            if shareable:
                filling.add(row.group)
            budget = max(budget - length, 0)
            plan.append((row, Segment(slot, row.num_cached, length)))
        return plan

    def forget_cache(self, *, keep_decoding: bool = False) -> None:
        """The cache is void (new weights, or freed): running samples go back in line, before all others, short ones
        first. `keep_decoding` leaves rows in their slots, and those that decode with what the cache holds of them."""
        for row in self.rows:
            row.has_old_entries = keep_decoding and row.num_cached >= row.num_needed
            if not row.has_old_entries:
                row.num_cached = 0
        if not keep_decoding:
            running = [row for row in self.rows if row.finish_reason is None]
            running.sort(key=lambda row: len(row.sequence))
            self.waiting.extendleft(reversed(running))
            self.rows.clear()

    def abort(self, request_ids: Collection[str] | None) -> int:
        chosen = [s for s in of_requests((*self.rows, *self.waiting), request_ids) if s.finish_reason is None]
        for sample in chosen:
            sample.finish_reason = "abort"
        self.waiting = deque(sample for sample in self.waiting if sample.finish_reason is None)
        return len(chosen)

    def end_session(self, session: str) -> None:
        """Its entries need not be kept when its last sample leaves its slot."""
        self._ended |= {row for row in self.rows if row.request.session == session}

    def _enter(self, slot: int, holders: dict[int, int]) -> None:
        sample = self.waiting.popleft()
        sample.num_cached = 0
        self._share_prompt(slot, sample, holders)
        if sample.num_cached == 0 and (session := self._session_of(sample)):
            sample.num_cached = self._slots.restore(session, slot, sample.sequence[: sample.num_needed])
        if slot == len(self.rows):
            self.rows.append(sample)
        else:
            self.rows[slot] = sample

    def _session_of(self, sample: Sample) -> str | None:
        """The session that keeps its entries, if one does."""
        return None if sample.request.multi_modal or sample.has_old_entries else sample.request.session

    def _share_prompt(self, slot: int, sample: Sample, holders: dict[int, int]) -> None:
        """Copy the prompt's entries from a slot that has them, if one does."""
        prefix = sample.num_prompt - 1
        source = holders.get(sample.group)
        if source is None or sample.num_cached >= prefix:
            return
        # The holder may have left its slot since the table was made.
        holder = self.rows[source]
        same = holder.group == sample.group and holder.request.prompt_token_ids == sample.request.prompt_token_ids
        if same and holder.shares_prompt:
            self._slots.copy(source, slot, prefix)
            sample.num_cached = prefix
            holders[sample.group] = slot if slot < len(self.rows) else source

    def _prompt_holders(self) -> dict[int, int]:
        """For each prompt, a slot whose cache holds it."""
        return {row.group: slot for slot, row in enumerate(self.rows) if row.shares_prompt}
