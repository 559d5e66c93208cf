"""The asynchronous engine on a loop of this process, its core in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.vllm.async_engine import AsyncVLLMEngine
from tests.models.tiny import tiny_model
from tests.rollout_vllm.conftest import small_settings
from tests.rollout_vllm.reference import log_probs, mean_gap
from tests.rollout_vllm.watched import PROMPTS, check_scores, generate, generate_watched

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]


def test_tokens_come_from_the_core_as_vllm_hands_them_to_its_users(folders: dict[str, Path]) -> None:
    """Both ways in one engine, one after the other; then requests that are cut off in the middle."""

    async def scenario() -> None:
        engine = AsyncVLLMEngine(small_settings(folders["llama_tied"], load_format="auto"))
        await engine.start()
        try:
            plain = await generate(engine)
            assert not engine._writing
            assert not engine._llm.output_processor.request_states, "vLLM forgets a request at its end"
            assert plain == await generate_watched(engine)
            await _cut_off(engine)
        finally:
            await engine.close()
        check_scores(plain, 1e-5)

    asyncio.run(scenario())


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
    model = tiny_model("llama_tied")
    for result in results:
        assert mean_gap(log_probs(model, PROMPTS[0], result.token_ids), result.log_probs) <= 1e-5
