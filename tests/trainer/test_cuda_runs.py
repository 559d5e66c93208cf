"""Whole GRPO runs on one CUDA device through Ray: the same metrics as in one process, and with Megatron."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dovetail.observability.run_folder import RunFolder
from tests.trainer.toy_run import Toy, repeatable

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
def in_one_process(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _metrics(toy, tmp_path_factory.mktemp("local"), KEYS, "--local")


def test_a_run_through_ray_on_cuda_has_the_metrics_of_one_process(
    toy: Toy, in_one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    _assert_same(_metrics(toy, tmp_path, KEYS), in_one_process)


def test_a_megatron_run_through_ray_on_cuda_has_the_metrics_of_the_plain_backend(
    toy: Toy, in_one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; pip install 'dovetail[megatron]'")
    _assert_same(_metrics(toy, tmp_path, {**KEYS, **MEGATRON}), in_one_process)


def test_a_broadcast_over_nccl_brings_the_first_ranks_values(tmp_path: Path) -> None:
    """One rank a GPU: NCCL refuses two ranks on one. With a single GPU the group has one rank."""
    size = min(2, torch.cuda.device_count())
    mp.spawn(_broadcast, args=(size, tmp_path), nprocs=size)
    assert [float((tmp_path / f"{rank}").read_text()) for rank in range(size)] == [7.0] * size


def _broadcast(rank: int, world_size: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    value = torch.full((1024,), 7.0 + rank, device=device)
    dist.broadcast(value, src=0)
    (folder / f"{rank}").write_text(str(float(value.mean())))
    dist.destroy_process_group()


def _metrics(toy: Toy, folder: Path, changes: dict[str, Any], *options: str) -> list[dict[str, Any]]:
    """Of a run as a user starts it, in a process that has not met CUDA before."""
    command = [sys.executable, "-m", "dovetail.cli.main", "train", *toy.arguments(folder, changes), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    return repeatable(RunFolder(folder).read_metrics())


def _assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(rows) == len(expected) == 3
    for row, wanted in zip(rows, expected, strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "response_length/mean"):
            assert row[name] == pytest.approx(wanted[name], rel=TOLERANCE, abs=TOLERANCE), name
