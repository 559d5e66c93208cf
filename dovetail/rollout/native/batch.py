"""The running batch on CPU: turns the scheduler's decisions into model steps and books their tokens. One thread at a
time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dovetail.models.exact import label_log_probs
from dovetail.models.router_replay import RouterReplay
from dovetail.rollout.native.attention import DecodeStep, ExactStep, PrefillStep, Segment, plan_spans
from dovetail.rollout.native.images import prefill_images, prefill_positions
from dovetail.rollout.native.kv_cache import SlotKVCache
from dovetail.rollout.native.sampler import SamplingRows, cut_to_masks, require_finite, sample
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


class RunningBatch:
    """A batch over dense slots; sessions keep at most `max_kept_tokens` between two turns. `exact`: `models.exact`.
    `routing`: of the model, where experts are kept with the cache.

    `PagedBatch` has the same methods; all but the counts are called between two steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        max_num_seqs: int,
        max_prefill_tokens: int,
        *,
        max_kept_tokens: int = 0,
        exact: bool = False,
        routing: RouterReplay | None = None,
    ) -> None:
        self.cache = SlotKVCache(max_kept_tokens)
        self.scheduler = Scheduler(max_num_seqs, max_prefill_tokens, self.cache)
        self.stats = BatchStats()
        self._model = model
        self._device = device
        self._exact = exact
        self._routing = routing
        self._rows_changed = True
        # Of the rows, until they change: all grow together, so the spans stay right.
        self._sampling: SamplingRows | None = None
        self._spans: list[tuple[int, int]] = []
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

    def end_session(self, session: str) -> None:
        self.scheduler.end_session(session)
        self.cache.forget_session(session)

    def drain(self) -> None:
        """Return once every generated token is booked: here every step is, before it returns."""

    def free_cache(self) -> None:
        """Forget the cache and give its memory back."""
        self.forget_cache()
        self.cache.free()

    def forget_cache(self, *, keep_decoding: bool = False) -> None:
        """Old entries must not be read again; running samples are prefilled anew before their next token, short ones
        first. With `keep_decoding` those that decode already go on with their old entries, which no others read."""
        self.scheduler.forget_cache(keep_decoding=keep_decoding)
        if keep_decoding:
            self.cache.forget_sessions()
        else:
            self.cache.clear()
        self._rows_changed = True

    @torch.inference_mode()
    def step(self, version: int) -> bool:
        """One prefill step if any row needs it, else one token for every row; True if a response was finished."""
        self._reserve()
        if self.scheduler.refill():
            self._rows_changed = True
        if self._prefill():
            return False
        return self._decode(version)

    def _prefill(self) -> bool:
        """Segments of several sequences end to end, without padding."""
        plan = self.scheduler.plan_prefill()
        if not plan:
            return False
        tokens = [token for row, segment in plan for token in row.sequence[segment.start : segment.end]]
        segments = [segment for _, segment in plan]
        # The module under the head: no logits, and so no (tokens, vocabulary) matrix, for prompts.
        self._model.base_model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=prefill_positions(plan, self._device),
            use_cache=False,
            kv_step=ExactStep(self.cache, segments) if self._exact else PrefillStep(self.cache, segments, self._device),
            **prefill_images(plan, self._device),
        )
        self._keep_experts(segments)
        for row, segment in plan:
            row.num_cached = segment.end
        self.stats.prefill_steps += 1
        self.stats.prefill_tokens += len(tokens)
        return True

    def _decode(self, version: int) -> bool:
        rows = self.scheduler.rows
        if not rows:
            return False
        lengths = [row.num_cached for row in rows]
        if self._rows_changed or self._sampling is None:
            self._sampling = SamplingRows.build(
                [row.request.sampling for row in rows],
                [row.seed for row in rows],
                [row.index for row in rows],
                self._device,
            )
            self._spans = plan_spans(lengths)
            self._shifts = [row.position_shift for row in rows]
            self._rows_changed = False
        places = torch.tensor(lengths, device=self._device)
        positions = places + torch.tensor(self._shifts, device=self._device) if any(self._shifts) else places
        segments = [Segment(slot, length, 1) for slot, length in enumerate(lengths)]
        output = self._model(
            input_ids=torch.tensor([[row.sequence[-1] for row in rows]], device=self._device),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            kv_step=ExactStep(self.cache, segments)
            if self._exact
            else DecodeStep(self.cache, places, [length + 1 for length in lengths], self._spans),
        )
        self._keep_experts(segments)
        masks, width = self._sampling.masks, self._sampling.mask_width
        sets = None if masks is None else cut_to_masks(output.logits[0], masks, width).cpu().numpy()
        logits = output.logits[0].clone() if self._exact else output.logits[0]
        tokens, log_probs = sample(output.logits[0], self._sampling, places + 1)
        if self._exact:
            log_probs = label_log_probs(logits, tokens, self._sampling.log_prob_temperatures(len(rows), self._device))
        scores = log_probs.tolist()
        require_finite(scores)
        any_finished = False
        for index, (row, token, log_prob) in enumerate(zip(rows, tokens.tolist(), scores, strict=True)):
            row.num_cached += 1
            row.extend([token], [log_prob], version, sets=None if sets is None else sets[index, None])
            if row.finish_reason is not None:
                any_finished = True
                if self._routing is not None and row.request.sampling.keep_experts:
                    row.routed_experts = self._routing.as_array(self.cache.experts(index, row.num_cached))
        self.stats.decode_steps += 1
        self.stats.decode_tokens += len(rows)
        return any_finished

    def _keep_experts(self, segments: Sequence[Segment]) -> None:
        """Of the step's tokens, which are those of these segments end to end."""
        if self._routing is None:
            return
        of_segments = self._routing.recorded().split([segment.length for segment in segments])
        for segment, experts in zip(segments, of_segments, strict=True):
            self.cache.put_experts(segment.slot, segment.start, experts)

    def _reserve(self) -> None:
        slots, needed, longest = self.scheduler.demand
        if needed > self.cache.capacity or slots > self.cache.num_slots:
            self.cache.reserve(slots, max(needed, min(longest, max(_FIRST_ROOM, needed + needed // 2))))
