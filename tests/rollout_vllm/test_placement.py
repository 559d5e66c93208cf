"""Where an actor goes that shares a device with the process that starts it, and whether it can read its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.rollout.vllm import ray_engine
from dovetail.rollout.vllm.ray_engine import RayVLLMEngine, beside_this_process

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("visible", "index", "wanted"),
    [(None, 0, "0"), (None, 2, "2"), ("", 1, "1"), ("3,5", 1, "5"), ("GPU-a", 0, "GPU-a")],
)
def test_it_sees_the_device_of_this_process_and_asks_ray_for_none(
    visible: str | None, index: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = beside_this_process(torch.device("cuda", index))
    assert options["env_vars"]["CUDA_VISIBLE_DEVICES"] == wanted
    assert options["num_gpus"] == options["num_cpus"] == 0


def test_on_a_cpu_it_is_given_no_device() -> None:
    assert "env_vars" not in beside_this_process(torch.device("cpu"))


@pytest.mark.parametrize(
    ("read", "num_workers", "wanted"),
    [("the bytes", 1, True), ("other bytes", 1, False), (None, 1, False), ("the bytes", 2, False)],
)
def test_memory_is_shared_where_the_engines_process_reads_it_back(
    read: str | None, num_workers: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "export_ipc_handle", lambda trial: tuple(trial.tolist()))

    def read_shared(handle: tuple[int, ...]) -> list[int] | None:
        return list(handle) if read == "the bytes" else None if read is None else [0, *handle]

    assert RayVLLMEngine._can_read(_engine(read_shared, num_workers), torch.device("cpu")) is wanted


def test_an_allocator_that_cannot_share_leaves_weights_to_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def export_ipc_handle(trial: torch.Tensor) -> tuple[int, ...]:
        raise RuntimeError("expandable segments cannot be shared")

    monkeypatch.setattr(ray_engine, "export_ipc_handle", export_ipc_handle)
    assert not RayVLLMEngine._can_read(_engine(lambda handle: pytest.fail("asked"), 1), torch.device("cpu"))


def _engine(read_shared: Any, num_workers: int) -> Any:
    """A `RayVLLMEngine` whose actor answers at once."""
    actor = SimpleNamespace(read_shared=SimpleNamespace(remote=read_shared))
    settings = SimpleNamespace(tensor_parallel_size=num_workers)
    return SimpleNamespace(settings=settings, actor=actor, _get=lambda answer: answer)
