"""One sample of a request on its way through SGLang, and the translation of sampling parameters. Sends nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.rollout.base import GenerationRequest, LogprobsMode, SamplingParams, derive_seed
from dovetail.rollout.request_rules import base_seed, check_prompt, stop_tokens
from dovetail.rollout.response import GrowingResponse

_MAX_SEED = 2**31 - 1


@dataclass(slots=True, eq=False)
class Sample(GrowingResponse):
    """`rid` is unique in the engine and the beginning of no other one: SGLang aborts by prefix. `cut` asks for the end
    with what is there; an abort without it only interrupts, and the rest is written by another call.

    Each call has a name of its own (`call_id`): an abort that SGLang echoes late would otherwise end the books of the
    next call under the same name, whose answer then never comes.
    """

    rid: str
    seed: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    cut: bool = False
    num_calls: int = 0

    @property
    def call_id(self) -> str:
        return f"{self.rid}{self.num_calls}."

    def absorb(self, output: Mapping[str, Any], version: int) -> None:
        """Take what one call wrote, all of it under `version`."""
        entries = output["meta_info"].get("output_token_logprobs") or []
        tokens = [int(entry[1]) for entry in entries]
        scores = [float(entry[0]) for entry in entries]
        reason = str(output["meta_info"]["finish_reason"]["type"])
        end = next((at + 1 for at, token in enumerate(tokens) if token in self.stop_token_ids), None)
        if end is not None:
            # SGLang does not look for stop tokens in a request that ignores end-of-sequence tokens.
            tokens, scores, reason = tokens[:end], scores[:end], "stop"
        self.extend(tokens, scores, version)
        if reason in ("stop", "length"):
            self.finish_reason = reason  # pyrefly: ignore[bad-assignment]
        elif reason != "abort":
            raise RuntimeError(f"SGLang ended a request with finish_reason={reason!r}; its log says why.")
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"
        elif self.cut:
            self.finish_reason = "abort"


def samples_of(request: GenerationRequest, serial: int, *, eos_ids: Collection[int], room: int) -> list[Sample]:
    """The n samples, each a request of its own to SGLang: its radix cache shares the prompt. `room` is how many tokens
    fit the context after the prompt."""
    sampling = request.sampling
    seed, stop = base_seed(sampling), stop_tokens(sampling, eos_ids)
    return [
        Sample(
            request,
            index,
            f"{serial}.{index}.",
            derive_seed(seed, index) & _MAX_SEED,
            min(sampling.max_new_tokens, room),
            stop,
        )
        for index in range(sampling.n)
    ]


def generate_body(sample: Sample, *, deterministic: bool) -> dict[str, Any]:
    """Fields of one request to `/generate`: what is still missing of the sample."""
    sampling = sample.request.sampling
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sample.max_new_tokens - len(sample.token_ids),
        "stop_token_ids": sorted(sample.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
    }
    if deterministic:
        # Random numbers are a hash of seed and position: what is continued goes on with the same ones.
        params["sampling_seed"] = sample.seed
    return {
        "input_ids": [*sample.request.prompt_token_ids, *sample.token_ids],
        "rid": sample.call_id,
        "sampling_params": params,
        "return_logprob": True,
    }


def batch_body(samples: Collection[Sample], *, deterministic: bool) -> dict[str, Any]:
    """Many samples in one request to `/generate`: every field a list."""
    bodies = [generate_body(sample, deterministic=deterministic) for sample in samples]
    return {name: [body[name] for body in bodies] for name in bodies[0]}


def check_request(
    request: GenerationRequest, *, max_model_len: int, vocab_size: int, mode: LogprobsMode, deterministic: bool
) -> None:
    """ValueError for what does not fit the model, and for what this SGLang cannot do or would die of."""
    check_prompt(request, max_model_len=max_model_len, vocab_size=vocab_size)
    sampling = request.sampling
    if not _can_mean(sampling, mode):
        raise ValueError(
            f"logprobs={sampling.logprobs!r} cannot be had from this SGLang engine with "
            f"temperature={sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}, "
            f"min_p={sampling.min_p}: the engine gives {mode!r} log-probs. Start it with another "
            f"rollout.logprobs_mode, or ask for {mode!r}."
        )
    if deterministic and sampling.min_p > 0:
        # An assertion in its sampler: the scheduler dies and the whole batch with it.
        raise ValueError(
            f"min_p={sampling.min_p} cannot be used with enable_deterministic_inference: SGLang's seeded sampler dies "
            "of it. Use top_p, or turn deterministic inference off."
        )


def _can_mean(sampling: SamplingParams, mode: LogprobsMode) -> bool:
    """SGLang cuts a copy: its log-probs are of the whole distribution. Greedy rows are at temperature 1 in it."""
    if sampling.logprobs == mode:
        return True
    unscaled = sampling.greedy or sampling.temperature == 1
    if sampling.logprobs == "processed":
        return not sampling.truncates and (mode == "temperature" or unscaled)
    return unscaled
