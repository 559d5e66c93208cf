"""Whole runs of a mixture with `router_replay`, and what is refused by name before one starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.effects import is_unused, unsupported_in_runs
from tests.models.tiny import save_tiny_model
from tests.trainer.toy_run import Toy, save_toy_data, train

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MODE = f"{A}.router_replay.mode"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("mixture")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 8}
    return Toy(save_tiny_model("qwen3_moe", folder / "model", **shape), save_toy_data(folder / "data"))


@pytest.mark.e2e
def test_a_run_with_r2_replays_in_every_mini_batch(mixture: Toy, tmp_path: Path) -> None:
    changes = {MODE: "R2", f"{A}.use_kl_loss": True, f"{A}.optim.lr": 1e-2}
    changes["actor_rollout_ref.model.enable_gradient_checkpointing"] = True
    _, steps = train(mixture.config(tmp_path / "run", changes))
    assert len(steps) == 3
    # The first mini-batch's weights are those of the recorded pass; the second one's routers have moved.
    assert all(0 < step["actor/routing_changed_share"] < 0.5 for step in steps)
    assert all(step["rollout_corr/k3_kl"] < 1e-8 for step in steps)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("mode", "key", "value", "why"),
    [
        ("R2", f"{A}.strategy", "megatron", "use fsdp2"),
        ("R2", f"{A}.ulysses_sequence_parallel_size", 2, "sequence parallelism"),
        ("R2", f"{R}.exact", True, "choose alike"),
        ("R2", "algorithm.rollout_correction.bypass_mode", True, "use R3"),
    ],
)
def test_what_cannot_replay_is_refused_by_name(mode: str, key: str, value: Any, why: str) -> None:
    config = load_config(overrides=[f"{MODE}={mode}", f"{key}={value}"]).config
    refused = [str(problem) for problem in unsupported_in_runs(config) if problem.key == MODE]
    assert len(refused) == 1
    assert why in refused[0]


@pytest.mark.unit
def test_r2_without_an_earlier_pass_has_no_effect_and_says_so() -> None:
    one_step = ["data.train_batch_size=64", f"{A}.ppo_mini_batch_size=64", f"{MODE}=R2"]
    assert is_unused(load_config(overrides=one_step).config, MODE)
    assert not is_unused(load_config(overrides=[*one_step, f"{A}.ppo_mini_batch_size=32"]).config, MODE)
