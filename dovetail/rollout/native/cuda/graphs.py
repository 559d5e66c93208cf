"""Whole decode steps as CUDA graphs, one per batch size, captured when first needed. Without CUDA, or with
`enforce_eager`, the same steps run one operation at a time.
"""

from __future__ import annotations

import bisect
import logging
import time
from typing import Any

import torch

from dovetail.rollout.native.cuda.decoder import Decoder
from dovetail.rollout.native.cuda.kernels.device import described
from dovetail.rollout.native.cuda.kernels.ops import Ops
from dovetail.rollout.native.cuda.paged_step import PagedDecode
from dovetail.rollout.native.cuda.pages import PagePool
from dovetail.rollout.native.cuda.slots import SlotState
from dovetail.rollout.native.sampler import cut_to_masks, raw_log_probs

logger = logging.getLogger(__name__)

_MAX_SPLITS = 32
_NUM_LOCKS = 4096


def batch_sizes(max_rows: int) -> list[int]:
    """Sizes of graphs: close enough that filling up costs little, few enough to capture in seconds."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512]
    sizes += list(range(640, 2049, 128)) + list(range(2304, 8193, 256))
    return [size for size in sizes if size < max_rows] + [max_rows]


class DecodeSteps:
    """Runs steps over the slots of `state`; results go to row `counter` of `out_tokens`, `out_log_probs` and, where
    there is room for sampling masks, `out_sets` (steps, rows, width)."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        state: SlotState,
        out_tokens: torch.Tensor,
        out_log_probs: torch.Tensor,
        ops: Ops,
        *,
        out_sets: torch.Tensor | None = None,
        use_graphs: bool,
    ) -> None:
        max_rows = out_tokens.shape[-1]
        self._out_sets = out_sets
        self._decoder, self._pool, self._state = decoder, pool, state
        self._out_tokens, self._out_log_probs = out_tokens, out_log_probs
        self._use_graphs = use_graphs
        self._ops = ops
        self._sizes = batch_sizes(max_rows)
        device = pool.device
        self.slots = torch.full((max_rows,), state.idle_slot, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self._stream: torch.cuda.Stream | None = None  # captures run on it
        self._processors = described(device).processors if device.type == "cuda" else 1
        # For kernels whose last program does what is left: zeros between them, so one after another may use the same.
        self._locks = torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=device)

    def size_for(self, num_rows: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def forget(self) -> None:
        """Addresses have changed: every graph must be captured again."""
        self._graphs.clear()
        self._memory = None

    @torch.inference_mode()
    def run(self, size: int, *, filters: bool, raw: bool) -> None:
        """One step of the first `size` rows of `slots`. `filters`: one of them has top-k, top-p or min-p; `raw`: one
        needs raw log-probs."""
        if not self._use_graphs:
            self._step(size, filters, raw)
            return
        if (size, filters, raw) not in self._graphs:
            # The largest first: smaller ones then fit into its memory, where growing ones would each add theirs.
            if not any(key[1:] == (filters, raw) for key in self._graphs) and size < self._sizes[-1]:
                self._capture(self._sizes[-1], filters, raw)
            self._capture(size, filters, raw)
        self._graphs[size, filters, raw].replay()

    def _step(self, size: int, filters: bool, raw: bool) -> None:
        state, slots = self._state, self.slots[:size]
        tokens, positions, lengths, targets = self._ops.begin_rows(slots, state, self._pool.shape.page_size)
        step = PagedDecode(self._pool, state.table, slots, lengths, targets, self._splits(size), self._locks, self._ops)
        drawn, log_probs = self._tokens[:size], self._log_probs[:size]
        for part, logits in self._decoder.logits(tokens, positions, step):
            self._cut(logits, slots, part)
            self._draw(logits, positions[part], slots[part], drawn[part], log_probs[part], filters=filters, raw=raw)
            del logits  # before there are the next
        self._ops.end_rows(slots, drawn, log_probs, state, self.counter, self._out_tokens, self._out_log_probs)
        self.counter += 1

    def _cut(self, logits: torch.Tensor, slots: torch.Tensor, part: slice) -> None:
        """Filter the rows of this part that keep their sampling masks."""
        if self._out_sets is None:
            return
        rows = slots[part]
        sets = cut_to_masks(logits, self._state.masks(rows), self._out_sets.shape[-1])
        first = part.start or 0
        place = self._out_sets[:, first : first + len(rows), : sets.shape[-1]]
        place.index_copy_(0, self.counter.long(), sets.unsqueeze(0))

    def _draw(
        self, logits: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, drawn: torch.Tensor,
        log_probs: torch.Tensor, *, filters: bool, raw: bool,
    ) -> None:  # fmt: skip
        self._ops.draw(logits, positions, slots, self._state, drawn, log_probs, filtered=filters)
        if raw:
            log_probs.copy_(torch.where(self._state.raw[slots.long()] != 0, raw_log_probs(logits, drawn), log_probs))

    def _splits(self, size: int) -> int:
        """How many programs share a sequence's keys: with a small batch one for each multiprocessor of the device."""
        pairs = size * self._pool.shape.num_kv_heads
        splits = min(_MAX_SPLITS, max(1, self._processors // pairs))
        return 1 << (splits.bit_length() - 1)

    def _capture(self, size: int, filters: bool, raw: bool) -> None:
        begin = time.perf_counter()
        counter, slots = self.counter.clone(), self.slots.clone()
        # Idle rows change nothing: the run that compiles the kernels leaves no trace.
        self.slots.fill_(self._state.idle_slot)
        stream = self._stream = self._stream or torch.cuda.Stream()  # one: memory freed on another is not taken here
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(size, filters, raw)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            # Other threads may use the device meanwhile; graphs run one at a time, so they share their memory.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                self._step(size, filters, raw)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.counter.copy_(counter)
        self.slots.copy_(slots)
        self._graphs[size, filters, raw] = graph
        logger.debug("captured a decode step of %d rows in %.2f s", size, time.perf_counter() - begin)
