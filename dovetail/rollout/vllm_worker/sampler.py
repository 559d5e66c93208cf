"""vLLM's sampler with one more meaning of log-probs: under the temperature, before top-k, top-p and min-p filtering.

vLLM offers "raw" (temperature 1, unfiltered) and "processed" (temperature, filtered). What a trainer recomputes lies
between. Runs inside vLLM's worker, with its first model runner; `gpu_sampler.py` is for the second.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

_GREEDY_BELOW = 1e-5  # vLLM's own border between greedy and sampled rows


class TemperatureLogprobsSampler(Sampler):
    """Raw log-probs, each row divided by its temperature first; greedy rows by 1."""

    def __init__(self, use_fp64_gumbel: bool = False) -> None:
        super().__init__("raw_logprobs", use_fp64_gumbel)
        self._temperature: torch.Tensor | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        self._temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, predict_bonus_token)
        finally:
            self._temperature = None

    # A static method of the base class, called through the instance.
    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        if self._temperature is None:
            return super().compute_logprobs(logits)
        temperature = torch.where(self._temperature < _GREEDY_BELOW, 1.0, self._temperature)
        return super().compute_logprobs(logits.to(torch.float32) / temperature.unsqueeze(1))
