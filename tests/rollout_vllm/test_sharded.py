"""FSDP2 on two processes feeding vLLM, beside it and from afar; vLLM on two processes, and on an exported folder."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.backends.build import build_backend
from dovetail.backends.torch_backend import TorchBackend
from dovetail.cli.main import main
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.models.policy import PolicyModel
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.vllm import VLLMEngine
from dovetail.weight_sync import FSDPVLLMShardingManager, GroupAddress, WeightReceiver, WeightSender
from tests.models.tiny import save_tiny_model, tiny_model
from tests.quick_python import quick_python
from tests.ranks import run_alone, run_ranks
from tests.rollout_vllm.conftest import small_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap
from tests.trainer.toy_run import Toy, save_toy_data, train
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
PROMPT = list(range(3, 203))
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


def _backend(family: str) -> TorchBackend:
    return build_backend(
        "fsdp2",
        PolicyModel(tiny_model(family), use_remove_padding=False, use_fused_kernels=False),
        fsdp=FP32,
    )


@torch.no_grad()
def _change(parameters: Any) -> None:
    """What a training step stands for here: every weight moves, the same way sharded or not."""
    for parameter in parameters:
        parameter.mul_(1.05).add_(0.003)


def _hybrid(rank: int, world_size: int, folder: str) -> list[tuple[list[int], list[int], list[float]]]:
    backend = _backend("llama_tied")
    engine = VLLMEngine(small_settings(folder, load_format="dummy"))
    manager = FSDPVLLMShardingManager(backend, engine, version=1)
    outcome = []
    for _ in range(2):
        with manager:
            (result,) = engine.generate([GenerationRequest("a", [*PROMPT, 5 + rank], GREEDY)])
            outcome.append((result.token_ids, result.weight_versions, result.log_probs))
        _change(backend.module.parameters())
        manager.weights_changed()
    engine.close()
    return outcome


def _save_model(rank: int, world_size: int, folder: Path) -> Path:
    return save_tiny_model("llama_tied", folder)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("hybrid")
    return run_ranks(_hybrid, 2, str(run_alone(_save_model, folder)))


def test_two_fsdp2_ranks_each_feed_the_engine_in_their_own_process(hybrid: list[Any]) -> None:
    results = hybrid
    model = tiny_model("llama_tied")
    for step in range(2):
        for rank in range(2):
            prompt = [*PROMPT, 5 + rank]
            tokens, versions, scores = results[rank][step]
            assert tokens == greedy(model, prompt, 12)
            assert versions == [1 + step] * 12
            assert mean_gap(log_probs(model, prompt, tokens), scores) <= 1e-5
        _change(model.parameters())


def _send(rank: int, world_size: int, num_receivers: int, file: str) -> None:
    backend = _backend("llama")
    _change(backend.module.parameters())
    sender = WeightSender(num_receivers, timeout_s=120) if rank == 0 else None
    if sender is not None:
        address = sender.address
        work = Path(file).with_suffix(".work")
        work.write_text(json.dumps([address.host, address.port, address.world_size, address.backend, 120]))
        work.rename(file)
        sender.send(backend.named_weights(), 1 << 16)
        return
    for _ in backend.named_weights():  # gathering is collective
        pass


def _receive_from_two_ranks(engine: VLLMEngine, folder: Path, version: int) -> None:
    file = folder / "address.json"
    thread = threading.Thread(target=run_ranks, args=(_send, 2, 1, str(file)))
    thread.start()
    wait_until(lambda: file.exists() or not thread.is_alive(), "an address")
    assert file.exists(), "the ranks ended before they gave an address"
    receiver = WeightReceiver(GroupAddress(*json.loads(file.read_text())), rank=1)
    engine.update_weights((item for bucket in receiver.buckets() for item in bucket.tensors()), version)
    receiver.close()
    thread.join(60)
    assert not thread.is_alive()


def test_two_fsdp2_ranks_feed_an_engine_elsewhere_by_broadcast(engines: dict[str, VLLMEngine], tmp_path: Path) -> None:
    model = tiny_model("llama")
    _change(model.parameters())
    _receive_from_two_ranks(engines["llama"], tmp_path, 4)
    (result,) = engines["llama"].generate([GenerationRequest("a", PROMPT, GREEDY)])
    assert result.token_ids == greedy(model, PROMPT, 12)
    assert result.weight_versions == [4] * 12


@pytest.mark.parametrize("family", ["llama_tied"])
def test_a_tensor_parallel_engine_takes_new_weights(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = os.fsencode(quick_python("tests.rollout_vllm.preloaded").path)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", quick)
    with VLLMEngine(small_settings(folders[family], tensor_parallel_size=2)) as engine:
        for seed in (0, 1):
            model = tiny_model(family, seed=seed)
            if seed == 1:
                engine.update_weights(model.named_parameters(), 1)
            (result,) = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
            assert result.token_ids == greedy(model, PROMPT, 12)
            assert result.weight_versions == [seed] * 12
            assert mean_gap(log_probs(model, PROMPT, result.token_ids), result.log_probs) <= 1e-5


def test_vllm_answers_with_an_exported_policy_as_transformers_does(tmp_path: Path) -> None:
    toy = Toy(save_tiny_model("llama_tied", tmp_path / "model"), save_toy_data(tmp_path / "data", count=12))
    keys = {"trainer.save_freq": 3, "actor_rollout_ref.actor.optim.lr": 1e-2}
    train(toy.config(tmp_path / "run", keys))
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    before = AutoModelForCausalLM.from_pretrained(toy.model, dtype=torch.float32).eval()
    prompts = [[5, 9, 30, 41], [7, 7, 60, 12, 90, 33]]
    engine = VLLMEngine(small_settings(out, max_model_len=64))
    asked = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    try:
        found = engine.generate([GenerationRequest(str(n), prompt, asked) for n, prompt in enumerate(prompts)])
    finally:
        engine.close()
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer.token_ids == greedy(model, prompt, 12)
        scores = torch.tensor(answer.log_probs)
        torch.testing.assert_close(scores, log_probs(model, prompt, answer.token_ids), atol=1e-4, rtol=0)
        # The trained model, not the one it began as.
        assert not torch.allclose(scores, log_probs(before, prompt, answer.token_ids), atol=1e-3)
