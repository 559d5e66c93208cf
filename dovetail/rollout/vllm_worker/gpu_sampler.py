"""What `sampler.py` does, for vLLM's second model runner, which on CUDA runs every dense model.

vLLM 0.26 also keeps logits in the model's dtype there while it divides by the temperature: in bfloat16 the result is
rounded once more, a logit of 20 by up to 0.06. Here it is divided in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.sampler import Sampler


class TemperatureLogprobsGpuSampler(Sampler):
    """Log-probs of logits over the temperature, before top-k, top-p and min-p filtering; of greedy rows over 1."""

    _batch: Any = None  # what `__call__` was given, for `sample`, whose arguments differ between vLLM's versions

    @classmethod
    def take_over(cls, sampler: Sampler) -> None:
        """Make `sampler` one of these. It keeps its state, which requests and other parts of the runner share."""
        sampler.__class__ = cls
        sampler.logprobs_mode = "processed_logprobs"

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        self._batch = input_batch
        try:
            return super().__call__(logits, input_batch)
        finally:
            self._batch = None

    def sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states, rows = self.sampling_states, self._batch.idx_mapping_np
        temperatures = states.temperature.np[rows]
        scales = bool(np.any((temperatures != 0.0) & (temperatures != 1.0)))
        filters = bool(
            np.any(states.top_k.np[rows] != states.vocab_size)
            or np.any(states.top_p.np[rows] != 1.0)
            or np.any(states.min_p.np[rows] != 0.0)
        )
        if not scales and not filters:
            return super().sample(logits, *args, **kwargs)
        # The base class works in place on what it is given.
        sampled, scores = super().sample(logits.to(torch.float32, copy=True), *args, **kwargs)
        if filters:
            scores = logits.to(torch.float32, copy=True)
            states.apply_temperature(scores, self._batch.expanded_idx_mapping, rows)
        return sampled, scores
