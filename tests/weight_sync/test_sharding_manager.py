"""The hybrid switch over FSDP backends on two real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dovetail.backends.build import build_backend
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.models.policy import PolicyModel
from dovetail.weight_sync import FSDPVLLMShardingManager
from tests.checksums import weight_checksum
from tests.models.tiny import tiny_model
from tests.ranks import run_ranks

FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32"))


class _Sink:
    """An engine that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.checksums: dict[str, str] = {}

    def update_weights(self, weights: object, version: int) -> None:
        self.events.append(f"update {version}")
        self.checksums = weight_checksum(weights)  # pyrefly: ignore[bad-argument-type]
        torch.rand(5)  # an engine that draws from torch's generator

    def wake(self, tags: list[str]) -> None:
        self.events.append(f"wake {','.join(tags)}")

    def sleep(self, tags: list[str]) -> None:
        self.events.append(f"sleep {','.join(tags)}")


def _manage(rank: int, world_size: int, strategy: str) -> tuple[list[str], dict[str, str], dict[str, str], list[float]]:
    network = PolicyModel(tiny_model("llama_tied", seed=4), use_remove_padding=False, use_fused_kernels=False)
    plain = {name: tensor.detach().clone() for name, tensor in network.hf_model.named_parameters()}
    backend = build_backend(strategy, network, fsdp=FP32)
    engine = _Sink() if rank == 0 else None
    manager = FSDPVLLMShardingManager(backend, engine)
    torch.manual_seed(11)
    draws = [torch.rand(1).item()]
    for _ in range(2):
        with manager:
            torch.rand(3)
        manager.weights_changed()
    draws.append(torch.rand(1).item())
    return engine.events if engine else [], engine.checksums if engine else {}, weight_checksum(plain.items()), draws


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_manager_sends_full_tensors_of_a_sharded_backend_and_keeps_training_randomness(strategy: str) -> None:
    results = run_ranks(_manage, 2, strategy)
    events, got, plain, _ = results[0]
    assert got == plain
    once = ["wake weights", "update {}", "wake kv_cache", "sleep weights,kv_cache"]
    assert events == [event.format(0) for event in once] + [event.format(1) for event in once]
    torch.manual_seed(11)
    expected = [torch.rand(1).item(), torch.rand(1).item()]
    assert [draws for *_, draws in results] == [expected, expected]


@pytest.mark.unit
def test_weights_that_do_not_fit_put_the_engine_to_sleep_and_leave_training_its_random_state() -> None:
    class Refuses(_Sink):
        def update_weights(self, weights: object, version: int) -> None:
            torch.rand(5)
            raise ValueError("no such tensor")

    engine = Refuses()
    source = SimpleNamespace(named_weights=list)
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    drawn = [torch.rand(1).item()]
    with pytest.raises(ValueError, match="no such tensor"), FSDPVLLMShardingManager(source, engine):
        pass
    assert [*drawn, torch.rand(1).item()] == expected
    assert engine.events == ["wake weights", "sleep weights,kv_cache"]
