"""Run the model on one step's tokens: ragged prefill, or one token for each row. Decides nothing about what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from dovetail.rollout.native.attention import DecodeStep, PrefillStep, Segment, plan_spans
from dovetail.rollout.native.kv_cache import SlotKVCache
from dovetail.rollout.native.sampler import SamplingRows, sample


class ModelRunner:
    def __init__(self, model: PreTrainedModel, cache: SlotKVCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self._spans: list[tuple[int, int]] = []
        self._sampling: SamplingRows | None = None

    def set_rows(self, sampling: SamplingRows, lengths: Sequence[int]) -> None:
        """The rows of the coming decode steps. All rows grow together, so the spans stay right until rows change."""
        self._sampling = sampling
        self._spans = plan_spans(lengths, self.device)

    @torch.inference_mode()
    def prefill(
        self,
        segments: Sequence[Segment],
        token_ids: Sequence[int],
        positions: torch.Tensor,
        images: Mapping[str, torch.Tensor],
    ) -> None:
        """Fill the cache with the segments' tokens, given end to end. The head is not run."""
        step = PrefillStep(self.cache, segments, self.device)
        # The module under the head: no logits, and so no (tokens, vocabulary) matrix, for prompts.
        self.model.base_model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=positions,
            use_cache=False,
            kv_step=step,
            **images,
        )

    @torch.inference_mode()
    def decode(
        self, last_tokens: Sequence[int], lengths: Sequence[int], shifts: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Feed each row's last token at the end of its cached `lengths`; return the next tokens and log-probs.
        `shifts` are between the tokens' places and their positions."""
        assert self._sampling is not None, "set_rows comes before decode"
        positions = torch.tensor(lengths, device=self.device)
        rotary = positions + torch.tensor(shifts, device=self.device) if any(shifts) else positions
        step = DecodeStep(self.cache, positions, [length + 1 for length in lengths], self._spans)
        output = self.model(
            input_ids=torch.tensor([last_tokens], device=self.device),
            position_ids=rotary.unsqueeze(0),
            use_cache=False,
            kv_step=step,
        )
        tokens, log_probs = sample(output.logits[0], self._sampling, positions + 1)
        return tokens.tolist(), log_probs.tolist()
