"""Whole GRPO runs on one CUDA device through Ray: the same metrics as in one process, and with Megatron."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dovetail.observability.run_folder import RunFolder
from tests.ranks import run_ranks
from tests.trainer.toy_run import repeatable, train_apart

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

A = "actor_rollout_ref.actor"
TOLERANCE = 1e-4
"""float32 sums in another order, over three steps, with an epsilon that keeps Adam from scaling noise up."""
KEYS: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.float32_matmul_precision": "highest",
    f"{A}.optim.eps": 1e-3,
    f"{A}.use_kl_loss": True,
}
MEGATRON = {f"{A}.strategy": "megatron", f"{A}.megatron.dtype": "float32"}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _metrics(train_apart(tmp_path_factory.mktemp("local"), KEYS))


def test_a_run_through_ray_on_cuda_has_the_metrics_of_one_process(
    in_one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    _assert_same(_metrics(train_apart(tmp_path, KEYS, use_ray=True)), in_one_process)


def test_a_megatron_run_through_ray_on_cuda_has_the_metrics_of_the_plain_backend(
    in_one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; pip install 'dovetail[megatron]'")
    _assert_same(_metrics(train_apart(tmp_path, {**KEYS, **MEGATRON}, use_ray=True)), in_one_process)


def test_a_broadcast_over_nccl_brings_the_first_ranks_values() -> None:
    """One rank a GPU: NCCL refuses two ranks on one. With a single GPU the group has one rank."""
    size = min(2, torch.cuda.device_count())
    assert run_ranks(_broadcast, size) == [7.0] * size


def _broadcast(rank: int, world_size: int) -> float:
    device = torch.device("cuda", rank)
    group = dist.new_group(backend="nccl")
    value = torch.full((1024,), 7.0 + rank, device=device)
    dist.broadcast(value, src=0, group=group)
    return float(value.mean())


def _metrics(run: Path) -> list[dict[str, Any]]:
    return repeatable(RunFolder(run).read_metrics())


def _assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(rows) == len(expected) == 3
    for row, wanted in zip(rows, expected, strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "response_length/mean"):
            assert row[name] == pytest.approx(wanted[name], rel=TOLERANCE, abs=TOLERANCE), name
