"""`mode=async` on CUDA: an actor on the device of the process that drives it, which shares the new weights with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dovetail.controller.cluster import start_ray, stop_ray
from dovetail.rollout.base import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.vllm.ray_engine import RayVLLMEngine, beside_this_process
from dovetail.weight_sync import tensor_checksum
from tests.models.tiny import tiny_model
from tests.rollout_vllm.conftest import gpu_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap
from tests.rollout_vllm.running import generating, num_tokens, wait_for_tokens

pytestmark = pytest.mark.gpu

PROMPT = list(range(3, 203))
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=250, ignore_eos=True)
BUCKET_BYTES = 1 << 16  # several buckets, and tensors larger than one


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[RayVLLMEngine]:
    device = torch.device("cuda", torch.cuda.current_device())
    start_ray(num_cpus=1, object_store_memory=256 << 20)
    settings, place = gpu_settings(folders["llama_tied"]), beside_this_process(device)
    with RayVLLMEngine(settings, bucket_bytes=BUCKET_BYTES, shares=device, **place) as built:
        yield built
    stop_ray()


def _on_device(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach().cuda()) for name, tensor in tiny_model("llama_tied", seed=seed).named_parameters()]


def test_shared_device_memory_brings_what_shared_memory_brings(
    engine: RayVLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._shares is not None, "the worker could not map this process's memory"
    weights = _on_device(3)
    names = [name for name, _ in weights]
    engine.update_weights(weights, 1)
    (on_device,), held = engine.generate([GenerationRequest("a", PROMPT, GREEDY)]), engine.weight_checksums(names)
    engine.update_weights(_on_device(4), 2)
    assert engine.weight_checksums(names) != held
    monkeypatch.setattr(engine, "_shares", None)
    engine.update_weights(weights, 1)
    (shared,) = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
    assert on_device == shared
    assert engine.weight_checksums(names) == held
    own = {name: tensor_checksum(tensor) for name, tensor in weights}
    assert {name: held[name] for name in own} == own
    assert on_device.token_ids == greedy(tiny_model("llama_tied", seed=3), PROMPT, 12)


def test_an_update_in_mid_generation_marks_every_token_with_the_version_that_wrote_it(engine: RayVLLMEngine) -> None:
    engine.update_weights(_on_device(0), 1)
    running = generating(engine, GenerationRequest("long", PROMPT, LONG))
    wait_for_tokens(engine, "long", 20)
    engine.update_weights(_on_device(5), 2)
    (result,) = running.result(60)
    _check_two_versions(result, old=0, new=5)


def test_a_paused_request_outlives_a_sleep_that_gives_the_memory_back(engine: RayVLLMEngine) -> None:
    engine.update_weights(_on_device(0), 1)
    running = generating(engine, GenerationRequest("long", PROMPT, LONG))
    wait_for_tokens(engine, "long", 20)
    engine.pause()
    count = num_tokens(engine, "long")
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > engine.health().kv_cache_bytes // 2
    engine.wake(["weights"])
    assert engine.weight_version == -1
    engine.update_weights(_on_device(5), 2)
    engine.wake(["kv_cache"])
    assert num_tokens(engine, "long") == count, "awake, and still paused"
    engine.continue_()
    (result,) = running.result(60)
    assert result.weight_versions.count(1) == count
    _check_two_versions(result, old=0, new=5)


def test_log_probs_under_a_cut_are_those_before_it(engine: RayVLLMEngine) -> None:
    engine.update_weights(_on_device(7), 1)
    sampling = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, max_new_tokens=40, n=4, seed=1, ignore_eos=True)
    results = engine.generate([GenerationRequest("a", PROMPT, sampling)])
    model = tiny_model("llama_tied", seed=7)
    for result in results:
        wanted = log_probs(model, PROMPT, result.token_ids, 0.7)
        assert mean_gap(wanted, result.log_probs) <= 1e-3 / 0.7


def _check_two_versions(result: GenerationResult, *, old: int, new: int) -> None:
    count = result.weight_versions.count(1)
    assert 20 <= count < 250
    assert result.weight_versions == [1] * count + [2] * (250 - count)
    head, tail = PROMPT + result.token_ids[:count], result.token_ids[count:]
    before, after = tiny_model("llama_tied", seed=old), tiny_model("llama_tied", seed=new)
    assert mean_gap(log_probs(before, PROMPT, head[len(PROMPT) :]), result.log_probs[:count]) <= 1e-3
    assert mean_gap(log_probs(after, head, tail), result.log_probs[count:]) <= 1e-3
