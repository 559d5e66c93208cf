"""One sample of a request on its way through vLLM, and the translation of sampling parameters. Runs nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dovetail.rollout.base import FinishReason, GenerationRequest, LogprobsMode, SamplingParams, derive_seed
from dovetail.rollout.request_rules import base_seed, same_meaning, stop_tokens
from dovetail.rollout.response import GrowingResponse

_MAX_SEED = 2**63 - 1


@dataclass(slots=True)
class Sample(GrowingResponse):
    """`vllm_id` is unique in the engine, `core_id` what vLLM's core calls it."""

    vllm_id: str
    seed: int
    core_id: str = field(default="", kw_only=True)

    def absorb(self, output: Any, version: int) -> None:
        """Take the new tokens of an `EngineCoreOutput`, written under `version`."""
        if output.new_token_ids:
            assert output.new_logprobs is not None, "every request asks for the log-probs of its tokens"
            # One row for each token, the sampled one's score in its first place.
            scores = [row[0] for row in output.new_logprobs.logprobs.tolist()]
            self.extend(output.new_token_ids, scores, version)

    def finish(self, reason: str) -> None:
        """End for what vLLM calls `reason`."""
        self.finish_reason = _finish_reason(reason)


def samples_of(request: GenerationRequest, serial: int) -> list[Sample]:
    """The n samples, each a vLLM request of its own: the prefix cache shares the prompt. Without a seed one is drawn,
    so that vLLM never takes random numbers from the process it shares with a trainer."""
    seed = base_seed(request.sampling)
    return [
        Sample(request, index, f"{serial}/{request.request_id}/{index}", derive_seed(seed, index))
        for index in range(request.sampling.n)
    ]


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
    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        seed=sample.seed & _MAX_SEED,
        max_tokens=min(sampling.max_new_tokens, room),
        stop_token_ids=sorted(stop_tokens(sampling, eos_ids)),
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


def _finish_reason(reason: str) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason  # pyrefly: ignore[bad-return]
    raise RuntimeError(f"vLLM ended a request with finish_reason={reason!r}; its log says why.")
