"""vLLM on CUDA: sleep gives memory back, an update in mid-generation meets asynchronous scheduling, and dense models
run in the second model runner, with a sampler of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.vllm import VLLMEngine
from tests.models.tiny import tiny_model
from tests.rollout_vllm.conftest import gpu_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap, top_k_top_p_log_probs
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu

PROMPT = list(range(3, 203))


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[VLLMEngine]:
    with VLLMEngine(gpu_settings(folders["llama_tied"])) as built:
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
    wait_until(lambda: any(len(sample.token_ids) >= 20 for sample in engine._samples()), "20 tokens")
    engine.update_weights(new.named_parameters(), 9)
    thread.join(60)
    count = results[0].weight_versions.count(0)
    assert results[0].weight_versions == [0] * count + [9] * (250 - count)
    head, tail = PROMPT + results[0].token_ids[:count], results[0].token_ids[count:]
    assert mean_gap(log_probs(old, PROMPT, head[len(PROMPT) :]), results[0].log_probs[:count]) <= 1e-3
    assert mean_gap(log_probs(new, head, tail), results[0].log_probs[count:]) <= 1e-3


def test_log_probs_under_a_cut_are_those_before_it(engine: VLLMEngine) -> None:
    model = tiny_model("llama_tied", seed=7)
    engine.update_weights(model.named_parameters(), 11)

    def first_tokens(temperature: float, **cut: float) -> dict[int, float]:
        sampling = SamplingParams(temperature=temperature, max_new_tokens=1, n=128, seed=1, ignore_eos=True, **cut)
        results = engine.generate([GenerationRequest("a", PROMPT, sampling)])
        return {result.token_ids[0]: result.log_probs[0] for result in results}

    first_tokens(1.0)  # from here on the prompt is in the cache, and all that follow have the same logits
    plain, warm, cut = first_tokens(1.0), first_tokens(0.7), first_tokens(0.7, top_k=20, top_p=0.8)
    both = set(warm) & set(cut)
    assert len(both) >= 8
    assert max(abs(warm[token] - cut[token]) for token in both) <= 1e-4
    # What divides them is the temperature: beyond it they differ by one constant, the logarithm of the new sum.
    shifts = [warm[token] - plain[token] / 0.7 for token in set(warm) & set(plain)]
    assert len(shifts) >= 8
    assert max(shifts) - min(shifts) <= 1e-4
    for scores, temperature in ((plain, 1.0), (warm, 0.7), (cut, 0.7)):
        wanted = torch.cat([log_probs(model, PROMPT, [token], temperature) for token in scores])
        # vLLM's attention asks for no more than TF32, and what logits are off by is divided by the temperature.
        assert mean_gap(wanted, list(scores.values())) <= 1e-3 / temperature
    for token, score in cut.items():
        kept = top_k_top_p_log_probs(model, PROMPT, [token], temperature=0.7, top_k=20, top_p=0.8)
        assert score + 0.05 < kept.item() < 0, "drawn from what the cut leaves, scored before it"


def test_a_seed_fixes_a_sample_whatever_else_is_in_the_batch(engine: VLLMEngine) -> None:
    engine.update_weights(tiny_model("llama_tied", seed=7).named_parameters(), 12)
    sampling = SamplingParams(temperature=0.9, max_new_tokens=24, n=2, seed=3, ignore_eos=True)
    request = GenerationRequest("a", PROMPT, sampling)
    alone = engine.generate([request])
    others = [
        GenerationRequest(f"b{i}", PROMPT[: 20 + i], SamplingParams(max_new_tokens=30, top_p=0.9, seed=i))
        for i in range(9)
    ]
    together = [result for result in engine.generate([*others, request]) if result.request_id == "a"]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert alone[0].token_ids != alone[1].token_ids


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_in_bfloat16_are_divided_by_the_temperature_in_float32(engine: VLLMEngine, top_p: float) -> None:
    import vllm

    sampler = engine._llm.model_executor.driver_worker.model_runner.sampler
    for row in range(2):
        params = vllm.SamplingParams(temperature=0.6, top_p=top_p, logprobs=0, seed=row)
        sampler.add_request(row, *((0,) if vllm.__version__.startswith("0.26") else ()), params)
    sampler.apply_staged_writes()
    logits = (torch.randn(2, sampler.sampling_states.vocab_size, device="cuda") * 10).bfloat16()
    rows = torch.arange(2, device="cuda", dtype=torch.int32)
    zeros = torch.zeros_like(rows)
    sampler._batch = SimpleNamespace(idx_mapping_np=rows.cpu().numpy(), expanded_idx_mapping=rows)
    given = logits.clone()
    _, scores = sampler.sample(given, rows, rows.cpu().numpy(), zeros.long(), zeros, zeros, return_logprobs=True)
    torch.testing.assert_close(scores, logits.float() / 0.6, rtol=1e-6, atol=0)  # a bfloat16 is off by 0.004
    assert torch.equal(given, logits)
