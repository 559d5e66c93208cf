"""Responses that one thread writes and another reads, and the random numbers of what continues them. No engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.remote.samples import Part, RemoteSample
from dovetail.rollout.remote.samples import samples_of as remote_samples_of
from dovetail.rollout.response import GrowingResponse
from dovetail.rollout.vllm.requests import ignore, samples_of

pytestmark = pytest.mark.unit

PROMPT, TOKENS = [5, 6], [7, 8, 9]


def request_of(prompt: list[int] = PROMPT) -> GenerationRequest:
    return GenerationRequest("a", prompt, SamplingParams(n=2, max_new_tokens=len(TOKENS), seed=3))


def remote_sample(prompt: list[int] = PROMPT) -> RemoteSample:
    return remote_samples_of(request_of(prompt), eos_ids=frozenset({2}), max_model_len=64)[0]


class Watched(list[Any]):
    """Calls `look` before and after each change, as a thread that reads meanwhile."""

    look: Any = None

    def __iadd__(self, more: Any) -> Any:
        self.look()
        self.extend(more)
        self.look()
        return self


def partials_during(sample: GrowingResponse, work: Any) -> list[GenerationResult]:
    seen: list[GenerationResult] = []
    for name in ("sequence", "log_probs", "versions"):
        watched = Watched(getattr(sample, name))
        watched.look = lambda: seen.append(sample.partial())
        setattr(sample, name, watched)
    work()
    return seen


def finish_in_vllm(sample: Any) -> None:
    scores = SimpleNamespace(logprobs=torch.full((len(TOKENS), 1), -0.5))
    output = SimpleNamespace(new_token_ids=TOKENS, new_logprobs=scores, finish_reason="length")
    sample.absorb(output, 4)


@pytest.mark.parametrize("engine", ["vllm", "remote"])
def test_a_response_is_seen_with_its_end_or_without_its_last_tokens(engine: str) -> None:
    """A checkpoint that says of a complete response that it runs cannot be continued: no room is left."""
    if engine == "vllm":
        local = samples_of(request_of(), 0, ignore)[0]
        seen = partials_during(local, lambda: finish_in_vllm(local))
    else:
        remote = remote_sample()
        seen = partials_during(remote, lambda: remote.take(Part(TOKENS, [-0.5] * 3, "length"), 4))
    for result in seen:
        assert len(result.token_ids) == len(result.log_probs) == len(result.weight_versions)
        assert (result.finish_reason, result.token_ids) in [("running", []), ("length", TOKENS)]
    assert {result.finish_reason for result in seen} == {"running", "length"}


def test_what_follows_in_a_sequence_does_not_repeat_its_random_numbers() -> None:
    """vLLM starts a generator with the seed of each request: of a continued response, and of each turn of an agent."""
    local = [
        sample.seed for prompt in (PROMPT, PROMPT + TOKENS) for sample in samples_of(request_of(prompt), 0, ignore)
    ]
    remote = [remote_sample(prompt).call_seed for prompt in (PROMPT, PROMPT + TOKENS)]
    assert len(set(local)) == len(local) == 4
    assert len(set(remote)) == 2
    again = remote_sample()
    again.take(Part(TOKENS, [-0.5] * 3, "abort"), 4)
    assert again.call_seed == remote[1], "a server that is asked again, or another request for the rest: the same"
    assert remote_sample().call_seed == remote[0] == local[0], "a request that is tried again draws the same numbers"
