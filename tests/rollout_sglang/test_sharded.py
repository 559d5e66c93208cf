"""FSDP2 on two real processes feeding SGLang servers, through the hybrid engine's sharding manager and from afar."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.backends.build import build_backend
from dovetail.backends.torch_backend import TorchBackend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.models.policy import PolicyModel
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.sglang import SGLangRollout
from dovetail.weight_sync import FSDPSGLangShardingManager, WeightSender
from tests.checksums import weight_checksum
from tests.models.tiny import save_tiny_model, tiny_model
from tests.ranks import run_alone, run_ranks
from tests.rollout_sglang.conftest import needs_sglang, small_settings
from tests.rollout_vllm.reference import greedy, log_probs, mean_gap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang"), needs_sglang]

FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))
PROMPT = list(range(3, 203))
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
NAMES = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]


@torch.no_grad()
def _change(parameters: Any) -> None:
    """What a training step stands for here: every weight moves, the same way sharded or not."""
    for parameter in parameters:
        parameter.mul_(1.05).add_(0.003)


def _backend() -> TorchBackend:
    policy = PolicyModel(tiny_model("llama_tied"), use_remove_padding=False, use_fused_kernels=False)
    return build_backend("fsdp2", policy, fsdp=FP32)


def _hybrid(rank: int, world_size: int, folder: str) -> list[tuple[list[int], list[int], list[float], dict]]:
    backend = _backend()
    settings = small_settings(folder, load_format="dummy")
    engine = SGLangRollout(settings, num_servers=1, bucket_bytes=1 << 18) if rank == 0 else None
    manager = FSDPSGLangShardingManager(backend, engine, version=1)
    outcome = []
    for _ in range(2):
        with manager:
            if engine is not None:
                (result,) = engine.generate([GenerationRequest("a", PROMPT, GREEDY)])
                held = engine.weight_checksums(NAMES)
                outcome.append((result.token_ids, result.weight_versions, result.log_probs, held))
        _change(backend.module.parameters())
        manager.weights_changed()
    if engine is not None:
        engine.close()
    return outcome


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("hybrid")
    return run_ranks(_hybrid, 2, str(run_alone(_save_model, folder)), timeout=800)


def _save_model(rank: int, world_size: int, folder: Path) -> Path:
    return save_tiny_model("llama_tied", folder)


@pytest.mark.slow
def test_two_fsdp2_ranks_feed_a_server_of_sglang(hybrid: list[Any]) -> None:
    outcome, nothing = hybrid
    assert nothing == []
    model = tiny_model("llama_tied")
    for step, (tokens, versions, scores, held) in enumerate(outcome):
        assert tokens == greedy(model, PROMPT, 12)
        assert versions == [1 + step] * 12
        assert mean_gap(log_probs(model, PROMPT, tokens), scores) <= 1e-5
        assert held == weight_checksum(model.named_parameters(), NAMES)
        _change(model.parameters())


def _send_twice(rank: int, world_size: int, num_receivers: int, told: Any) -> None:
    backend = _backend()
    sender = WeightSender(num_receivers, timeout_s=300) if rank == 0 else None
    if sender is not None:
        told.send(sender.address)
    for _ in range(2):
        _change(backend.module.parameters())
        if sender is not None:
            sender.send(backend.named_weights(), 1 << 18)
        else:
            for _ in backend.named_weights():  # gathering is collective
                pass


@pytest.mark.slow
def test_two_fsdp2_ranks_feed_servers_elsewhere_by_broadcast(engine: SGLangRollout) -> None:
    model = tiny_model("llama_tied")
    ours, theirs = multiprocessing.Pipe()
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(run_ranks, _send_twice, 2, engine.num_weight_ranks, theirs, timeout=600)
        assert ours.poll(600)
        engine.join_weight_group(ours.recv())
        for version in (31, 32):
            _change(model.parameters())
            engine.receive_weights(version)
            results = engine.generate([GenerationRequest(str(n), PROMPT, GREEDY) for n in range(4)])
            assert [result.token_ids for result in results] == [greedy(model, PROMPT, 12)] * 4
            assert {v for result in results for v in result.weight_versions} == {version}
            assert mean_gap(log_probs(model, PROMPT, results[0].token_ids), results[0].log_probs) <= 1e-5
            assert engine.weight_checksums(NAMES) == weight_checksum(model.named_parameters(), NAMES)
        sending.result()
