"""vLLM on CUDA: sleep gives memory back, and an update in mid-generation meets asynchronous scheduling."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.vllm import VLLMEngine, VLLMSettings
from tests.models.tiny import tiny_model
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = pytest.mark.gpu

PROMPT = list(range(3, 203))


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[VLLMEngine]:
    settings = VLLMSettings(
        str(folders["llama_tied"]),
        dtype="float32",
        max_num_seqs=32,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        # In float32 vLLM's first choice is FlashInfer, which need not be installed.
        engine_kwargs={"attention_backend": "TRITON_ATTN"},
    )
    with VLLMEngine(settings, verify_weights=4) as built:
        yield built


def test_sleep_gives_memory_back_and_an_update_brings_the_weights_again(engine: VLLMEngine) -> None:
    model = tiny_model("llama_tied", seed=1)
    assert engine.frees_memory
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - before > engine.health().kv_cache_bytes // 2
    engine.wake(["weights"])
    assert engine.weight_version == -1
    engine.update_weights(((name, tensor.cuda()) for name, tensor in model.named_parameters()), 3)
    engine.wake(["kv_cache"])
    sampling = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    (result,) = engine.generate([GenerationRequest("a", PROMPT, sampling)])
    assert result.token_ids == greedy(model, PROMPT, 12)
    assert mean_gap(log_probs(model, PROMPT, result.token_ids), result.log_probs) <= 1e-3


def test_an_update_in_mid_generation_marks_every_token_with_the_version_that_wrote_it(engine: VLLMEngine) -> None:
    old, new = tiny_model("llama_tied"), tiny_model("llama_tied", seed=5)
    engine.update_weights(old.named_parameters(), 0)
    results: list[GenerationResult] = []
    sampling = SamplingParams(temperature=0, max_new_tokens=250, ignore_eos=True)
    request = GenerationRequest("long", PROMPT, sampling)
    thread = threading.Thread(target=lambda: results.extend(engine.generate([request])))
    thread.start()
    while not any(len(sample.token_ids) >= 20 for sample in engine._live.of(None)):
        time.sleep(0.001)
    engine.update_weights(new.named_parameters(), 9)
    thread.join(60)
    count = results[0].weight_versions.count(0)
    assert results[0].weight_versions == [0] * count + [9] * (250 - count)
    head, tail = PROMPT + results[0].token_ids[:count], results[0].token_ids[count:]
    assert mean_gap(log_probs(old, PROMPT, head[len(PROMPT) :]), results[0].log_probs[:count]) <= 1e-3
    assert mean_gap(log_probs(new, head, tail), results[0].log_probs[count:]) <= 1e-3
