"""Whole runs with `rollout.keep_sampling_mask`: masks pass through every phase; what cannot have them is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.effects import unsupported_in_runs
from tests.trainer.toy_run import Toy, train

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
CUT = {f"{R}.keep_sampling_mask": True, f"{R}.top_k": 12, f"{R}.top_p": 0.9, f"{R}.temperature": 0.8}
KL = {f"{A}.use_kl_loss": True, f"{A}.kl_loss_type": "k3", f"{A}.entropy_coeff": 0.01}
STREAM = {
    "async_training.mode": "fully_async",
    f"{A}.ppo_mini_batch_size": 4,
    "async_training.record": True,
    f"{A}.entropy_coeff": 0.01,
}


@pytest.mark.e2e
@pytest.mark.parametrize("changes", [KL, STREAM], ids=["kl", "stream"])
def test_engine_and_trainer_agree_in_every_step(toy: Toy, tmp_path: Path, changes: dict[str, Any]) -> None:
    _, steps = train(toy.config(tmp_path / "run", {**CUT, **changes}))
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert 0 < step["actor/entropy"] <= math.log(12)
        if changes is KL or number == 0:  # later responses of the stream are of older weights
            assert step["rollout_corr/k3_kl"] < 1e-8
    if changes is KL:
        assert all(0 <= step["actor/kl_loss"] < 1 for step in steps)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (f"{R}.name", "vllm", "only name=native"),
        (f"{A}.strategy", "megatron", "use fsdp2"),
        (f"{R}.multi_turn.enable", True, "conversations"),
        ("trainer.method", "distill", "whole vocabulary"),
        (f"{R}.exact", True, "whole vocabulary"),
    ],
)
def test_what_cannot_have_masks_is_refused_by_name(key: str, value: Any, why: str) -> None:
    keys = [f"{name}={setting}" for name, setting in CUT.items()]
    config = load_config(overrides=[*keys, f"{key}={value}"]).config
    refused = [str(problem) for problem in unsupported_in_runs(config) if problem.key == f"{R}.keep_sampling_mask"]
    assert len(refused) == 1
    assert why in refused[0]
