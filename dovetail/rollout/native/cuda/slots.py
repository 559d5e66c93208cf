"""What the device knows of each running sequence, by slot. A slot's state stays where it is while its sequence runs.

A decode batch is a list of slots, so letting sequences in and out uploads that list and moves nothing. One slot more
than there are sequences is never active: it fills a batch up to its graph's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.rollout.base import SamplingParams
from dovetail.rollout.native.cuda.transfer import upload
from dovetail.rollout.native.noise import stream_key
from dovetail.rollout.native.sampler import Filters, MaskRows, mask_filters
from dovetail.rollout.native.scheduler import Sample

_FIRST_STOPS = 8
_NO_TOP_K = 2**31 - 1


TableEntry = tuple[int, int, int]
"""A slot, a column of its table of pages, and the page that stands there."""


def needs_raw_log_probs(sampling: SamplingParams) -> bool:
    """Whether log-probs at temperature 1 are not those that a token is drawn by."""
    return sampling.logprobs == "raw" and sampling.temperature not in (0, 1)


class SlotState:
    """Tensors over slots. `generation` changes when a tensor was replaced, and with it every address in a graph."""

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.idle_slot = num_slots
        self.device = device
        self.generation = 0
        count = num_slots + 1

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.last_tokens = zeros(torch.int64)
        self.cached = zeros(torch.int32)
        self.active = zeros(torch.int32)
        self.max_lengths = zeros(torch.int32)
        self.keys = zeros(torch.int64)
        self.temperatures = torch.ones(count, device=device)
        self.greedy = zeros(torch.int32)
        self.raw = zeros(torch.int32)  # rows whose log-probs are those at temperature 1, and which have another
        no_top_k = torch.full((count,), _NO_TOP_K, dtype=torch.int32, device=device)
        ones = torch.ones(count, dtype=torch.float64, device=device)
        self.filters = Filters(no_top_k, ones, zeros(torch.float32), zeros(torch.int32))
        warm = torch.ones(count, device=device)
        self._masks = MaskRows(zeros(torch.int32), ones.clone(), zeros(torch.float32), warm)
        self.stop_ids = torch.full((count, _FIRST_STOPS), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros((count, max_pages), dtype=torch.int32, device=device)

    def enter(self, entries: Sequence[tuple[int, Sample]]) -> None:
        """Samples whose sequences, but for the last token, are in the cache start to decode in these slots."""
        if not entries:
            return
        samples = [sample for _, sample in entries]
        self._fit_stops(max(len(sample.stop_ids) for sample in samples))
        width = self.stop_ids.shape[1]
        numbers = upload(
            [
                [
                    slot,
                    sample.sequence[-1],
                    sample.num_needed,
                    sample.max_length,
                    stream_key(sample.seed, sample.index),
                    int(sample.request.sampling.greedy),
                    int(needs_raw_log_probs(sample.request.sampling)),
                    *([*sample.stop_ids] + [-1] * (width - len(sample.stop_ids))),
                ]
                for slot, sample in entries
            ],
            torch.int64,
            self.device,
        )
        temperatures = [1.0 if s.request.sampling.greedy else s.request.sampling.temperature for s in samples]
        slots = numbers[:, 0]
        self.last_tokens[slots] = numbers[:, 1]
        self.cached[slots] = numbers[:, 2].int()
        self.max_lengths[slots] = numbers[:, 3].int()
        self.keys[slots] = numbers[:, 4]
        self.greedy[slots] = numbers[:, 5].int()
        self.raw[slots] = numbers[:, 6].int()
        self.stop_ids[slots] = numbers[:, 7:]
        self.temperatures[slots] = upload(temperatures, torch.float32, self.device)
        self._set_filters(slots, [sample.request.sampling for sample in samples])
        self.active[slots] = torch.ones_like(slots, dtype=torch.int32)

    def _set_filters(self, slots: torch.Tensor, sampling: Sequence[SamplingParams]) -> None:
        rows = [
            (p.top_k if p.top_k > 0 else _NO_TOP_K, p.top_p, p.min_p, p.truncates and p.logprobs == "processed")
            if p.truncates and not p.keep_mask
            else (_NO_TOP_K, 1.0, 0.0, False)
            for p in sampling
        ]
        for by_slot, values in zip(self.filters, zip(*rows, strict=True), strict=True):
            by_slot[slots] = upload(values, by_slot.dtype, self.device)
        for by_slot, values in zip(self._masks, mask_filters(sampling), strict=True):
            by_slot[slots] = upload(values, by_slot.dtype, self.device)

    def masks(self, slots: torch.Tensor) -> MaskRows:
        """How these slots are filtered where they keep their masks."""
        index = slots.long()
        return MaskRows._make(by_slot[index] for by_slot in self._masks)

    def set_table(self, entries: Sequence[TableEntry]) -> None:
        if entries:
            slots, columns, pages = upload(list(zip(*entries, strict=True)), torch.int64, self.device)
            self.table[slots, columns] = pages.int()

    def _fit_stops(self, count: int) -> None:
        width = self.stop_ids.shape[1]
        if count > width:
            wider = self.stop_ids.new_full((self.stop_ids.shape[0], 1 << (count - 1).bit_length()), -1)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
            self.generation += 1
