"""One sample of a request on its way through vLLM, and the translation of sampling parameters. Runs nothing."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dovetail.rollout.base import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    LogprobsMode,
    SamplingParams,
    derive_seed,
)

_MAX_SEED = 2**63 - 1


@dataclass(slots=True)
class Sample:
    """`vllm_id` is unique in the engine. The three lists grow together, one entry per token."""

    request: GenerationRequest
    index: int
    vllm_id: str
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def absorb(self, completion: Any, version: int) -> None:
        """Take the new tokens of a vLLM output (DELTA), written under `version`."""
        token_ids = list(completion.token_ids)
        if token_ids:
            assert completion.logprobs is not None, "every request asks for the log-probs of its tokens"
            self.log_probs += [
                entry[token].logprob for entry, token in zip(completion.logprobs, token_ids, strict=True)
            ]
            self.token_ids += token_ids
            self.versions += [version] * len(token_ids)
        if completion.finish_reason is not None:
            self.finish_reason = _finish_reason(completion.finish_reason)

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None, "a result is made of a finished sample"
        return GenerationResult(
            request_id=self.request.request_id,
            sample_index=self.index,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            weight_versions=self.versions,
        )


def samples_of(request: GenerationRequest, serial: int) -> list[Sample]:
    """The n samples, each a vLLM request of its own: the prefix cache shares the prompt. Without a seed one is drawn,
    so that vLLM never takes random numbers from the process it shares with a trainer."""
    seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
    return [
        Sample(request, index, f"{serial}/{request.request_id}/{index}", derive_seed(seed, index))
        for index in range(request.sampling.n)
    ]


def check_prompt(request: GenerationRequest, *, max_model_len: int, vocab_size: int) -> None:
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


def check_logprobs(sampling: SamplingParams, engine_mode: LogprobsMode) -> None:
    """vLLM has one meaning of log-probs per engine. Refuse a request that wants one which differs from it here."""
    if same_meaning(sampling, engine_mode):
        return
    raise ValueError(
        f"logprobs={sampling.logprobs!r} cannot be had from this vLLM engine with temperature={sampling.temperature}, "
        f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}: the engine gives {engine_mode!r} "
        f"log-probs. Start it with logprobs={sampling.logprobs!r}, or ask for {engine_mode!r}."
    )


def vllm_sampling_params(sample: Sample, *, eos_ids: Collection[int], room: int) -> Any:
    """`room` is how many tokens still fit the context. Stop tokens are ours alone: vLLM's own reading of the model's
    end-of-sequence tokens depends on whether it has a tokenizer."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = sample.request.sampling
    stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        seed=sample.seed & _MAX_SEED,
        max_tokens=min(sampling.max_new_tokens, room),
        stop_token_ids=sorted(stop),
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
    )


def prompt_of(request: GenerationRequest) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
    if request.multi_modal:
        prompt["multi_modal_data"] = dict(request.multi_modal)
    return prompt


def same_meaning(sampling: SamplingParams, engine_mode: LogprobsMode) -> bool:
    """Whether what the request asks for is what an engine of this mode gives, under this sampling."""
    unscaled = sampling.greedy or sampling.temperature == 1
    pair = {sampling.logprobs, engine_mode}
    if len(pair) == 1:
        return True
    if pair == {"temperature", "processed"}:
        return not sampling.truncates
    if pair == {"temperature", "raw"}:
        return unscaled
    return unscaled and not sampling.truncates


def _finish_reason(reason: str) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason  # pyrefly: ignore[bad-return]
    raise RuntimeError(f"vLLM ended a request with finish_reason={reason!r}; its log says why.")
