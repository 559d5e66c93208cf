"""A sample that a vLLM engine is writing, and the translation of requests into vLLM's words. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dovetail.rollout.base import FinishReason, GenerationRequest, GenerationResult, derive_seed
from dovetail.rollout.request_rules import base_seed, stop_tokens
from dovetail.rollout.response import GrowingResponse

_MAX_SEED = 2**63 - 1


Deliver: TypeAlias = Callable[[GenerationResult], None]
"""These engines end every request with a result; `rollout.base.Deliver` also takes requests that failed."""


def ignore(result: GenerationResult) -> None:
    """Deliver to nobody."""


@dataclass(slots=True)
class Sample(GrowingResponse):
    """`vllm_id` is unique in the engine; `deliver` is called once, with the result."""

    vllm_id: str
    seed: int
    deliver: Deliver = field(default=ignore, kw_only=True)

    def absorb(self, output: Any, version: int) -> None:
        """Take the new tokens of an `EngineCoreOutput`, written under `version`."""
        if output.new_token_ids:
            assert output.new_logprobs is not None, "every request asks for the log-probs of its tokens"
            # One row for each token, the sampled one's score in its first place.
            scores = [row[0] for row in output.new_logprobs.logprobs.tolist()]
            reason = None if output.finish_reason is None else _finish_reason(str(output.finish_reason))
            self.extend(output.new_token_ids, scores, version, reason)

    def finish(self, reason: str) -> None:
        """End for what vLLM calls `reason`."""
        self.finish_reason = _finish_reason(reason)
        self.deliver(self.result())


class CoreOutputs:
    """Takes the place of vLLM's output processor: `take` sees what every step wrote, as the core's own objects.

    vLLM makes a `RequestOutput`, a completion and a dictionary of log-probs for every token of every sequence: ten
    times the host's work of writing the token down (docs/rollout-design.md). Its own `LLM.generate` avoids some of
    that until a sequence ends, but then cannot say which weights wrote which token. The processor itself sees the
    outputs that end a request, to forget it; all of them where it keeps statistics.
    """

    def __init__(self, processor: Any, take: Callable[[Sequence[Any]], None], *, keeps_statistics: bool) -> None:
        self._processor = processor
        self._take = take
        self._keeps_statistics = keeps_statistics

    def process_outputs(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        self._take(outputs)
        if not self._keeps_statistics:
            outputs = [output for output in outputs if output.finish_reason is not None]
        return self._processor.process_outputs(outputs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


def samples_of(request: GenerationRequest, serial: int, deliver: Deliver) -> list[Sample]:
    """The n samples, each a vLLM request of its own: the prefix cache shares the prompt. Without a seed one is drawn,
    so that vLLM never takes random numbers from the process it shares with a trainer. vLLM starts a generator with it:
    neither a continued response nor the next turn of a conversation may repeat the random numbers of what is before it
    in the sequence."""
    seed, length = base_seed(request.sampling), len(request.prompt_token_ids)
    indices = range(request.sample_index, request.sample_index + request.sampling.n)
    names = [f"{serial}/{request.request_id}/{index}" for index in indices]
    return [
        Sample(request, index, name, derive_seed(seed, index, length), deliver=deliver)
        for index, name in zip(indices, names, strict=True)
    ]


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
