"""What holds for a request in every engine: sampling, prompts that fit, stop tokens, seeds, what log-probs mean. Runs
nothing."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import replace

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import GenerationRequest, LogprobsMode, SamplingParams


def sampling_params(rollout: RolloutConfig, *, n: int, validate: bool, greedy: bool = False) -> SamplingParams:
    """How training or validation samples; the seed is each request's own.

    Of a run `rollout.stop_token_ids` is what `dovetail.agents.stops` makes of it.
    """
    source = rollout.val_kwargs if validate else rollout
    kind = SamplingParams(
        n=n,
        max_new_tokens=rollout.response_length,
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
        keep_experts=rollout.enable_rollout_routing_replay and not validate,
    )
    if greedy or not source.do_sample or source.temperature == 0:
        return replace(kind, temperature=0.0)
    names = ("temperature", "top_p", "top_k", "min_p")
    kind = replace(kind, **{name: getattr(source, name) for name in names})
    keeps = rollout.keep_sampling_mask and not validate
    return replace(kind, keep_mask=True, logprobs="processed") if keeps else kind


def check_prompt(request: GenerationRequest, *, max_model_len: int, vocab_size: int) -> None:
    """ValueError unless the prompt fits the model's context and vocabulary."""
    prompt = request.prompt_token_ids
    if not 0 < len(prompt) < max_model_len:
        raise ValueError(
            f"request {request.request_id!r} has {len(prompt)} prompt tokens; between 1 and {max_model_len - 1} fit "
            f"max_model_len={max_model_len} with room for one more."
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(
            f"request {request.request_id!r} has token ids from {min(prompt)} to {max(prompt)}; the model's "
            f"vocabulary is 0 to {vocab_size - 1}."
        )


def stop_tokens(sampling: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
    """The request's stop tokens and, unless ignored, the model's."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))


def base_seed(sampling: SamplingParams) -> int:
    """The request's seed, or a fresh one: an engine never takes random numbers from the process around it."""
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


def check_logprobs(sampling: SamplingParams, given: LogprobsMode, engine: str) -> None:
    """ValueError where a request asks for other log-probs than this engine gives: it has one meaning of them."""
    if sampling.keep_mask:
        raise ValueError(f"keep_mask=True: {engine} returns no sampling masks; use rollout.name=native.")
    if sampling.keep_experts:
        raise ValueError(f"keep_experts=True: {engine} returns no routed experts; use rollout.name=native.")
    if _meaning(sampling, sampling.logprobs) != _meaning(sampling, given):
        raise ValueError(
            f"logprobs={sampling.logprobs!r} with temperature={sampling.temperature}, top_k={sampling.top_k}, "
            f"top_p={sampling.top_p}, min_p={sampling.min_p} cannot be had from {engine}, which gives {given!r} "
            f"log-probs. Ask for {given!r}, or start it for others: a vLLM server with the worker extension gives "
            "those under the temperature."
        )


def _meaning(sampling: SamplingParams, mode: LogprobsMode) -> tuple[bool, bool]:
    """Whether log-probs of this mode are under another temperature than 1, and after filtering, for this request."""
    is_scaled = sampling.temperature not in (0, 1)
    return is_scaled and mode != "raw", sampling.truncates and mode == "processed"
