"""The running batch on CUDA: launches steps ahead of what has been read, and books tokens when they arrive.

Several decode steps are launched at a time and read one launch later, so the device never waits for the host. Sequences
that end by length leave at once, since the host can count; those that end by a stop token idle for a launch or two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from dovetail.models.router_replay import RouterReplay
from dovetail.protocol.sampling_mask import NOT_KEPT
from dovetail.rollout.base import EngineError
from dovetail.rollout.native.batch import BatchStats
from dovetail.rollout.native.cuda.decoder import build_decoder, can_be_captured
from dovetail.rollout.native.cuda.graphs import DecodeSteps
from dovetail.rollout.native.cuda.kernels.ops import Ops, triton_ops
from dovetail.rollout.native.cuda.paged_step import PagedPrefill
from dovetail.rollout.native.cuda.pages import KVShape, PagePool
from dovetail.rollout.native.cuda.scheduler import PagedScheduler, Row
from dovetail.rollout.native.cuda.slots import SlotState, needs_raw_log_probs
from dovetail.rollout.native.cuda.transfer import Readback, upload
from dovetail.rollout.native.sampler import require_finite
from dovetail.rollout.native.scheduler import Sample

_STEPS = 4
# One launch being read, one running, one being written.
_LAUNCHES = 3
# Memory left for activations, logits and graphs when pages are taken from what is free.
_SPARE_BYTES = 3 << 30
_MAX_CPU_PAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Launch:
    index: int
    num_steps: int
    rows: list[Row]
    version: int


class PagedBatch:
    """The same interface as `RunningBatch`. `memory_share` bounds the pages by a share of the device's memory,
    `max_pages` by number. `fuse=False` runs every model through its own forward. `reuse_prefixes` keeps the pages of
    what has left, for prompts that begin with the same tokens.
    Sampling masks have at most `mask_width` ids a token. `routing`: of the model, where its experts are kept with keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        max_num_seqs: int,
        max_prefill_tokens: int,
        max_model_len: int,
        *,
        memory_share: float = 0.5,
        cache_dtype: torch.dtype | None = None,
        use_graphs: bool = True,
        fuse: bool = True,
        page_size: int = 64,
        max_pages: int | None = None,
        reuse_prefixes: bool = True,
        mask_width: int = 0,
        routing: RouterReplay | None = None,
        ops: Ops | None = None,
    ) -> None:
        self.stats = BatchStats()
        self._model = model
        self._device = device
        self._max_prefill_tokens = max_prefill_tokens
        self._memory_share = memory_share
        self._max_pages = max_pages
        self._max_model_len = max_model_len
        self._ops = triton_ops() if ops is None else ops
        self._routing = routing
        self._decoder = build_decoder(model, self._ops, fuse=fuse, routing=routing)
        expert_bytes = 0 if routing is None else routing.bytes_per_token
        shape = _kv_shape(model, page_size, cache_dtype or model.dtype, expert_bytes)
        self._pool = PagePool(shape, device)
        self._scheduler = PagedScheduler(
            max_num_seqs, self._pool, steps_ahead=2 * _STEPS, reuse_prefixes=reuse_prefixes
        )
        self._state = SlotState(max_num_seqs, shape.pages_for(max_model_len), device)
        self._tokens = Readback(_LAUNCHES, (_STEPS, max_num_seqs), torch.int64, device)
        self._log_probs = Readback(_LAUNCHES, (_STEPS, max_num_seqs), torch.float32, device)
        # -1: what is not written was not kept.
        size = (_STEPS, max_num_seqs, mask_width)
        self._sets = Readback(_LAUNCHES, size, torch.int32, device, fill=NOT_KEPT) if mask_width else None
        self._steps = DecodeSteps(
            self._decoder,
            self._pool,
            self._state,
            self._tokens.device.flatten(0, 1),
            self._log_probs.device.flatten(0, 1),
            self._ops,
            out_sets=None if self._sets is None else self._sets.device.flatten(0, 1),
            use_graphs=use_graphs and device.type == "cuda" and can_be_captured(model),
        )
        self._launches: deque[_Launch] = deque()
        self._num_launches = 0
        self._batch_slots: list[int] = []
        self._filters = self._raw = False  # whether a row of the batch is filtered, needs raw log-probs
        self._addresses: tuple[int, ...] = ()
        self._weights_changed = True
        self._has_grown = False  # as far as what is there needs, or memory allows
        self._any_finished = False  # since the last step, also while steps in flight were drained

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.rows)

    @property
    def kv_cache_bytes(self) -> int:
        return self._pool.nbytes

    def add(self, samples: Iterable[Sample]) -> None:
        self._scheduler.add(samples)
        self._has_grown = False

    def abort(self, request_ids: Collection[str] | None) -> int:
        self.drain()
        return self._scheduler.abort(request_ids)

    def drain(self) -> None:
        """Book everything that was launched; nothing runs on the device when this returns."""
        while self._launches:
            self._book()

    def forget_cache(self, *, keep_decoding: bool = False) -> None:
        self.drain()
        self._scheduler.forget_cache(keep_decoding=keep_decoding)
        self._weights_changed = True

    def free_cache(self) -> None:
        self.forget_cache()
        self._pool.resize(0)
        self._steps.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self, version: int) -> bool:
        """Prefill what is missing, else launch decode steps and read the launch before; True if a response ended."""
        # Triton launches on the current device, which need not be the engine's.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._step(version)
        any_finished, self._any_finished = self._any_finished, False
        return any_finished

    def _step(self, version: int) -> None:
        scheduler = self._scheduler
        if not scheduler.rows:
            self._has_grown = False
            self._provide_pages()
        if not scheduler.rows or self._weights_changed:
            self._check_addresses()
        if not scheduler.admit() and self._provide_pages():
            scheduler.admit()
        self._join()
        # Prompts go together, and then all rows decode. Responses that are recomputed may be long: rows that are ready
        # decode between the parts of them.
        if self._prefill() and not scheduler.recomputing:
            return
        launched = self._launch(version)
        while len(self._launches) > int(launched):
            self._book()
        if scheduler.idle:
            self.drain()
        elif not launched and not self._any_finished and not scheduler.rows:
            self._refuse()

    def _provide_pages(self) -> bool:
        """Pages for what runs and what waits, as far as memory goes; True if there are more than before."""
        if self._has_grown:
            return False
        self._has_grown = True
        scheduler, pool, shape = self._scheduler, self._pool, self._pool.shape
        samples = [*(row.sample for row in scheduler.rows), *scheduler.waiting]
        lengths = sorted((sample.max_length for sample in samples), reverse=True)[: scheduler.num_slots]
        # A prompt's own last page lives beside its samples' copies until all have joined.
        wanted = sum(shape.pages_for(length) + 1 for length in lengths)
        if scheduler.rows:
            # Requests that come while others run may come one by one: double, so that this happens a few times only.
            most = scheduler.num_slots * (shape.pages_for(self._max_model_len) + 1)
            wanted = max(wanted, min(2 * pool.num_pages, most))
        # New pages cost new graphs, some 0.1 s for each batch size: not for a few more, and then enough for long.
        if wanted > pool.num_pages * 1.05:
            wanted = min(max(wanted, pool.num_pages * 3 // 2), self._affordable_pages())
        grows = wanted > pool.num_pages * 1.05
        if grows:
            self._grow(wanted)
        return grows

    def _grow(self, num_pages: int) -> None:
        self.drain()
        self._steps.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            copied = num_pages + self._pool.num_pages // 2  # first the keys and then the values are there twice
            if copied * self._pool.shape.page_bytes > self._free_bytes():
                self.free_cache()
        self._pool.resize(num_pages)

    def _check_addresses(self) -> None:
        """Graphs hold addresses: they go when a weight has moved."""
        self._weights_changed = False
        addresses = (self._state.generation, *(parameter.data_ptr() for parameter in self._model.parameters()))
        if addresses != self._addresses:
            self._addresses = addresses
            self._steps.forget()

    def _affordable_pages(self) -> int:
        if self._max_pages is not None or self._device.type != "cuda":
            return self._max_pages or _MAX_CPU_PAGES
        budget = min(self._memory_share * torch.cuda.mem_get_info(self._device)[1], self._free_bytes())
        return max(0, int(budget)) // self._pool.shape.page_bytes

    def _free_bytes(self) -> int:
        """Memory of the device for pages, those that are there included."""
        free = torch.cuda.mem_get_info(self._device)[0] + self._pool.nbytes - _SPARE_BYTES
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def _refuse(self) -> None:
        sample = self._scheduler.waiting[0]
        raise EngineError(
            f"request {sample.request.request_id!r} of up to {sample.max_length} tokens does not fit the KV cache of "
            f"{self._pool.num_pages} pages x {self._pool.shape.page_size} tokens; raise gpu_memory_utilization or "
            "shorten the request."
        )

    def _join(self) -> None:
        joined = self._scheduler.join()
        self._pool.copy(joined.copies)
        self._state.set_table(joined.entries)

    def _prefill(self) -> bool:
        budget = self._max_prefill_tokens
        pieces = []
        for fill in self._scheduler.fills():
            count = min(budget, fill.end - fill.done)
            if count:
                pieces.append((fill, count))
            budget -= count
        if not pieces:
            return False
        step = PagedPrefill(self._pool, pieces, self._ops)
        self._decoder.fill(step.tokens, step.positions, step)
        for fill, count in pieces:
            self._scheduler.filled(fill, count)
        self.stats.prefill_steps += 1
        self.stats.prefill_tokens += sum(count for _, count in pieces)
        return True

    def _launch(self, version: int) -> bool:
        rows = self._reserved_rows()
        if not rows:
            return False
        self._start_rows(rows)
        size = self._steps.size_for(len(rows))
        num_steps = min(_STEPS, max(row.steps_left for row in rows))
        index = self._num_launches % _LAUNCHES
        self._steps.counter.fill_(index * _STEPS)
        for _ in range(num_steps):
            self._steps.run(size, filters=self._filters, raw=self._raw)
        self._tokens.send(index)
        self._log_probs.send(index)
        if self._sets is not None:
            self._sets.send(index)
        for row in rows:
            row.num_cached += min(num_steps, row.steps_left)
        self._num_launches += 1
        self._launches.append(_Launch(index, num_steps, rows, version))
        self.stats.decode_steps += num_steps
        return True

    def _reserved_rows(self) -> list[Row]:
        """Rows that decode next, with pages for it. When pages run out, the newest rows go back in line."""
        scheduler = self._scheduler
        while rows := scheduler.decodable():
            entries = scheduler.reserve(rows, _STEPS)
            if entries is not None:
                self._state.set_table(entries)
                return rows
            # Booking may end rows and so free pages; only if it does not must someone go.
            if self._launches:
                self.drain()
            elif self._provide_pages():
                continue
            elif scheduler.recomputing:
                return []  # until all have joined their prompts
            elif len(rows) > 1:
                scheduler.requeue(scheduler.rows[-max(1, len(rows) // 8) :])
            else:
                scheduler.requeue(rows)
                self._refuse()
        return []

    def _start_rows(self, rows: list[Row]) -> None:
        """Tell the device of newcomers, and of the new batch if it changed."""
        slots = [row.slot for row in rows]
        new = [row for row in rows if not row.started]
        if new:
            self._state.enter([(row.slot, row.sample) for row in new])
            for row in new:
                row.started = True
            if self._state.generation != self._addresses[0]:
                self._check_addresses()
        if not new and slots == self._batch_slots:
            return
        self._batch_slots = slots
        size = self._steps.size_for(len(rows))
        padding = size - len(rows)
        self._steps.slots[:size] = upload(slots + [self._state.idle_slot] * padding, torch.int32, self._device)
        sampling = [row.sample.request.sampling for row in rows]
        self._filters = any(params.truncates and not params.keep_mask for params in sampling)
        self._raw = any(map(needs_raw_log_probs, sampling))

    def _book(self) -> None:
        launch = self._launches.popleft()
        tokens = self._tokens.read(launch.index)[: launch.num_steps, : len(launch.rows)].T.tolist()
        log_probs = self._log_probs.read(launch.index)[: launch.num_steps, : len(launch.rows)].T.tolist()
        sets = None if self._sets is None else self._sets.read(launch.index)
        try:
            for index, (row, row_tokens, row_log_probs) in enumerate(zip(launch.rows, tokens, log_probs, strict=True)):
                if row.sample.finish_reason is None:
                    row_sets = None if sets is None else sets[:, index]
                    self._book_row(row, row_tokens, row_log_probs, row_sets, launch.version)
            self._take_experts([row for row in launch.rows if row.sample.finish_reason is not None])
        except EngineError:
            # The device is ahead of what was booked: start again from the tokens that the host has.
            self._launches.clear()
            self.forget_cache()
            raise

    def _book_row(
        self, row: Row, tokens: list[int], log_probs: list[float], sets: np.ndarray | None, version: int
    ) -> None:
        ended = tokens[-1] < 0
        if ended:
            last = next(i for i, token in enumerate(tokens) if token < 0)
            tokens, log_probs = [*tokens[:last], -2 - tokens[last]], log_probs[: last + 1]
        require_finite(log_probs)
        row.sample.extend(tokens, log_probs, version, sets=None if sets is None else sets[: len(tokens)])
        self.stats.decode_tokens += len(tokens)
        if ended:
            assert row.sample.finish_reason is not None, "device and host agree on what ends a sequence"
            self._scheduler.leave(row)
            self._any_finished = True

    def _take_experts(self, ended: list[Row]) -> None:
        """Of rows that have ended and whose pages nobody has taken yet."""
        rows = [row for row in ended if row.sample.request.sampling.keep_experts and row.sample.routed_experts is None]
        if self._routing is None or not rows:
            return
        entries = self._pool.experts_of([(row.pages, row.sample.num_needed) for row in rows])
        for row, own in zip(rows, entries, strict=True):
            row.sample.routed_experts = self._routing.as_array(own)


def _kv_shape(model: PreTrainedModel, page_size: int, dtype: torch.dtype, expert_bytes: int) -> KVShape:
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    return KVShape(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        page_size=page_size,
        dtype=dtype,
        expert_bytes=expert_bytes,
    )
