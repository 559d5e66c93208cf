"""A batch for the asynchronous engine, and what a user of vLLM reads beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.vllm.async_engine import AsyncVLLMEngine
from dovetail.rollout.vllm.requests import Sample
from tests.models.tiny import tiny_model
from tests.rollout_vllm.reference import log_probs, mean_gap, take_user_output

PROMPTS = [list(range(3 + row, 40 + 2 * row)) for row in range(5)]
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=24, n=3, seed=7, ignore_eos=True)


async def generate(engine: AsyncVLLMEngine) -> list[GenerationResult]:
    requests = [GenerationRequest(f"r{row}", prompt, SAMPLING) for row, prompt in enumerate(PROMPTS)]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [result for results in answers for result in results]


async def generate_watched(engine: AsyncVLLMEngine) -> list[GenerationResult]:
    """As `generate`, from what vLLM hands to its users, which must be the engine's results to the bit."""
    handed: dict[str, Sample] = {}
    vllm_generate = engine._llm.generate

    async def watched(prompt: Any, params: Any, request_id: str) -> Any:
        known = engine._live.get(request_id)
        assert known is not None
        copy = handed[request_id] = Sample(known.request, known.index, request_id, known.seed)
        async for output in vllm_generate(prompt, params, request_id):
            take_user_output(copy, output)
            yield output

    engine._llm.output_processor._keeps_statistics = True  # makes an object for every token
    engine._llm.generate = watched
    try:
        results = await generate(engine)
    finally:
        engine._llm.generate = vllm_generate
        engine._llm.output_processor._keeps_statistics = False
    copies = {(sample.request.request_id, sample.index): sample.result() for sample in handed.values()}
    in_order = [copies[result.request_id, result.sample_index] for result in results]
    assert in_order == results
    return in_order


def check_scores(results: Sequence[GenerationResult], tolerance: float) -> None:
    """Against plain transformers, which has the same weights."""
    model = tiny_model("llama_tied")
    for row, result in enumerate(results):
        prompt = PROMPTS[row // SAMPLING.n]
        assert result.num_prompt_tokens == len(prompt)
        wanted = log_probs(model, prompt, result.token_ids, SAMPLING.temperature)
        assert mean_gap(wanted, result.log_probs) <= tolerance
