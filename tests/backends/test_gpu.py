"""Backends on one CUDA device: the same steps as on the CPU, real offload, state saved from and to the device.

Tolerance 1e-4 in fp32: CUDA kernels sum in another order than the CPU's, and use fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dovetail.backends.build import build_backend
from dovetail.backends.device_memory import memory_in_use
from dovetail.backends.torch_backend import TorchBackend
from dovetail.config.fsdp import FSDPConfig
from dovetail.controller.spans import SpanRecorder
from tests.backends.tiny import (
    FP32,
    OPTIM,
    as_numpy,
    cut,
    largest_difference,
    tiny_batch,
    tiny_policy,
    total_weight,
    weighted_nll,
)

pytestmark = pytest.mark.gpu

BACKENDS = {
    "single": ("single", {}),
    "fsdp2": ("fsdp2", {}),
    "fsdp2, cpu offload": ("fsdp2", {"offload_policy": True}),
    "fsdp": ("fsdp", {}),
}
MOVABLE = [name for name in BACKENDS if name != "fsdp2, cpu offload"]


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    # Both back ends, as a run has: NCCL for CUDA tensors, gloo for what is offloaded to the host.
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    torch.cuda.set_device(0)
    yield
    dist.destroy_process_group()


def build(name: str, base: FSDPConfig = FP32) -> TorchBackend:
    strategy, settings = BACKENDS[name]
    fsdp = base.model_copy(update=settings)
    return build_backend(strategy, tiny_policy(remove_padding=True), fsdp=fsdp, optim=OPTIM, device="cuda:0")


def steps(backend: TorchBackend, count: int = 2) -> float:
    batch = tiny_batch()
    norm = 0.0
    for _ in range(count):
        backend.forward_backward(cut(batch, (3, 5)), weighted_nll(total_weight(batch)))
        norm = backend.optim_step().grad_norm
    return norm


@pytest.mark.parametrize("name", BACKENDS)
def test_training_on_cuda_equals_training_on_the_cpu(name: str) -> None:
    reference = build_backend("single", tiny_policy(remove_padding=True), fsdp=FP32, optim=OPTIM)
    expected = steps(reference)
    backend = build(name)
    assert steps(backend) == pytest.approx(expected, abs=1e-4)
    assert largest_difference(as_numpy(backend.named_weights()), as_numpy(reference.named_weights())) < 1e-4


@pytest.mark.parametrize("name", MOVABLE)
def test_offload_frees_the_device_and_changes_nothing(name: str) -> None:
    kept, moved = build(name), build(name)
    for backend in (kept, moved):
        steps(backend)
    del backend
    before = torch.cuda.memory_allocated()
    moved.offload()
    freed = before - torch.cuda.memory_allocated()
    num_bytes = sum(weight.nbytes for weight in as_numpy(kept.named_weights()).values())
    assert freed >= 3 * num_bytes  # weights and two moments
    moved.onload()
    for backend in (kept, moved):
        steps(backend)
    assert largest_difference(as_numpy(kept.named_weights()), as_numpy(moved.named_weights())) == 0.0


@pytest.mark.parametrize("name", MOVABLE)
def test_weights_can_be_streamed_while_they_are_offloaded(name: str) -> None:
    backend = build(name)
    expected = as_numpy(backend.named_weights())
    backend.offload()
    assert largest_difference(as_numpy(backend.named_weights()), expected) == 0.0


@pytest.mark.parametrize("name", BACKENDS)
def test_state_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    backend = build(name)
    steps(backend)
    backend.save_state(tmp_path)
    steps(backend)
    again = build(name)
    again.load_state(tmp_path)
    steps(again)
    assert largest_difference(as_numpy(backend.named_weights()), as_numpy(again.named_weights())) == 0.0


@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16_trains_and_reports_memory(name: str) -> None:
    backend = build(name, FSDPConfig())
    assert 0 < steps(backend) < 100
    assert {tensor.dtype for _, tensor in backend.named_weights()} == {torch.float32}
    assert backend.memory()["memory/allocated_gib"] > 0


def test_a_recorded_call_reports_its_own_peak_and_the_process_keeps_the_largest() -> None:
    recorder, gib = SpanRecorder(), 1024**3
    held = torch.empty(gib // 4, dtype=torch.uint8, device="cuda")
    with recorder.recording("actor", "large"):
        del_me = torch.empty(gib, dtype=torch.uint8, device="cuda")
        del del_me
        torch.cuda.empty_cache()
    with recorder.recording("actor", "small"):
        pass
    large, small = (span.memory_gib for span in recorder.take())
    assert large is not None
    assert small is not None
    assert large - small == pytest.approx(1.0, abs=0.05)
    assert memory_in_use(held.device)["memory/peak_allocated_gib"] >= 1.25
