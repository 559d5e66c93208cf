"""The asynchronous engine on a loop of this process, its core in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.vllm.async_engine import AsyncVLLMEngine
from dovetail.rollout.vllm.requests import Sample
from tests.models.tiny import tiny_model
from tests.rollout_vllm.conftest import small_settings
from tests.rollout_vllm.reference import log_probs, mean_gap, take_user_output

pytestmark = pytest.mark.engine

PROMPTS = [list(range(3 + row, 40 + 2 * row)) for row in range(5)]
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=24, n=3, seed=7, ignore_eos=True)


def test_tokens_come_from_the_core_as_vllm_hands_them_to_its_users(folders: dict[str, Path]) -> None:
    """Both ways in one engine, one after the other; then requests that are cut off in the middle."""

    async def scenario() -> None:
        engine = AsyncVLLMEngine(small_settings(folders["llama_tied"], load_format="auto"))
        await engine.start()
        try:
            plain = await _generate(engine)
            assert not engine._writing
            assert not engine._llm.output_processor.request_states, "vLLM forgets a request at its end"
            handed = await _watched(engine, lambda: _generate(engine))
            assert plain == handed
            await _cut_off(engine)
        finally:
            await engine.close()
        _check(plain)

    asyncio.run(scenario())


async def _generate(engine: AsyncVLLMEngine) -> list[GenerationResult]:
    requests = [GenerationRequest(f"r{row}", prompt, SAMPLING) for row, prompt in enumerate(PROMPTS)]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [result for results in answers for result in results]


async def _watched(
    engine: AsyncVLLMEngine, generate: Callable[[], Awaitable[list[GenerationResult]]]
) -> list[GenerationResult]:
    """What a user of vLLM reads while `generate` runs, in the order of its results, which must be the same."""
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
        results = await generate()
    finally:
        engine._llm.generate = vllm_generate
        engine._llm.output_processor._keeps_statistics = False
    copies = {(sample.request.request_id, sample.index): sample.result() for sample in handed.values()}
    in_order = [copies[result.request_id, result.sample_index] for result in results]
    assert in_order == results
    return in_order


async def _cut_off(engine: AsyncVLLMEngine) -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=180, n=2, ignore_eos=True)
    running = asyncio.create_task(engine.generate(GenerationRequest("cut", PROMPTS[0], sampling)))
    while engine.num_tokens().get("cut", 0) < 10:
        await asyncio.sleep(0.001)
    assert await engine.abort() == 2
    results = await running
    assert [result.finish_reason for result in results] == ["abort", "abort"]
    assert sum(len(result.token_ids) for result in results) >= 10
    assert not engine._writing
    _check(results, temperature=1.0, prompts=[PROMPTS[0]] * 2)


def _check(
    results: Sequence[GenerationResult], *, temperature: float = SAMPLING.temperature, prompts: Any = None
) -> None:
    model = tiny_model("llama_tied")
    for row, result in enumerate(results):
        prompt = PROMPTS[row // SAMPLING.n] if prompts is None else prompts[row]
        assert result.num_prompt_tokens == len(prompt)
        assert mean_gap(log_probs(model, prompt, result.token_ids, temperature), result.log_probs) <= 1e-5
