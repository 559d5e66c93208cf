"""How the section `rollout` samples, in training and in validation. Knows no prompt."""

from __future__ import annotations

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import SamplingParams


def sampling_params(rollout: RolloutConfig, *, n: int, validate: bool, greedy: bool = False) -> SamplingParams:
    """How training or validation samples; the seed is each request's own."""
    source = rollout.val_kwargs if validate else rollout
    greedy = greedy or not source.do_sample
    if greedy or source.temperature == 0:
        return SamplingParams(
            temperature=0.0, n=n, max_new_tokens=rollout.response_length, ignore_eos=rollout.ignore_eos
        )
    return SamplingParams(
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        n=n,
        max_new_tokens=rollout.response_length,
        ignore_eos=rollout.ignore_eos,
    )
