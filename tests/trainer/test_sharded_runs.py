"""Whole runs with FSDP1 on two Ray workers, and with Megatron resumed by the trainer.

Each starts processes that import their backend, 10 to 30 s: a backend alone does not show that the trainer builds,
saves, and resumes it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.manifest import verify_folder
from dovetail.observability.run_folder import RunFolder
from tests.ranks import run_alone
from tests.trainer.test_workers import answers, assert_close
from tests.trainer.toy_run import Toy, make_toy, repeatable, train, train_apart

pytestmark = [pytest.mark.e2e, pytest.mark.distributed, pytest.mark.timeout(600)]

A = "actor_rollout_ref.actor"
KEYS: dict[str, Any] = {
    f"{A}.optim.eps": 1e-3,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 1,
    "ray_init.object_store_memory": 128 << 20,
}


@pytest.mark.slow  # a layout: `backends/test_parity` trains with FSDP1 in `make test`
def test_a_run_with_fsdp1_is_the_run_of_one_process(toy: Toy, tmp_path: Path) -> None:
    two = {"trainer.n_gpus_per_node": 2, f"{A}.strategy": "fsdp", "actor_rollout_ref.ref.strategy": "fsdp"}
    sharded = train_apart(tmp_path / "two", {**KEYS, **two}, use_ray=True)
    _, alone = train(toy.config(tmp_path / "one", KEYS))
    for step in (1, 2):
        assert answers(sharded, step) == answers(tmp_path / "one", step)
    assert_close(RunFolder(sharded).read_metrics(), alone)
    files = verify_folder(sharded / "global_step_2").files
    assert {"actor/part_0.json", "actor/part_1.json", "actor/rng_1.safetensors"} <= files.keys()


def test_a_megatron_run_that_is_resumed_is_the_run_that_was_not(tmp_path: Path) -> None:
    whole, resumed = run_alone(_megatron_twice, tmp_path, timeout=400.0)
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert resumed == whole


def _megatron_twice(rank: int, world_size: int, root: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run, and what a copy of it that has lost all after its first checkpoint makes of the rest. No Ray."""
    toy = make_toy(root)
    keys = {
        **KEYS,
        f"{A}.strategy": "megatron",
        f"{A}.megatron.dtype": "float32",
        f"{A}.optim.lr_scheduler_type": "cosine",
        "trainer.total_training_steps": 3,
    }
    _, whole = train(toy.config(root / "whole", keys))
    shutil.copytree(root / "whole", root / "resumed")
    for step in (2, 3):
        shutil.rmtree(root / "resumed" / f"global_step_{step}")
    (root / "resumed" / "latest_checkpointed_iteration.txt").write_text("1\n")
    _, resumed = train(toy.config(root / "resumed", keys))
    return repeatable(whole), repeatable(resumed)
