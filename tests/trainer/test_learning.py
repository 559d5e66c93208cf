"""The reward of a task that can be learned rises, with every trainer, whatever the seed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.toy_run import DAPO, Toy, save_toy_model, train

pytestmark = pytest.mark.e2e

LEARNING: dict[str, Any] = {
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "critic.optim.lr": 3e-3,
    "trainer.total_training_steps": 16,
}
PPO = {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.95}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def mean_of(rows: list[dict[str, Any]], name: str) -> float:
    found = [row[name] for row in rows if name in row]
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", [pytest.param({}, id="grpo"), pytest.param(PPO, id="ppo")])
def test_the_share_of_right_characters_rises(toy: Toy, tmp_path: Path, changes: dict[str, Any], seed: int) -> None:
    """From 0.53 - 0.58 to 0.87 - 0.95 in the six runs; half of the vocabulary is right."""
    model = save_toy_model(tmp_path / "model", seed=seed)
    keys = {**LEARNING, **changes, "actor_rollout_ref.model.path": str(model), "trainer.seed": seed}
    _, rows = train(toy.config(tmp_path / "run", keys))
    first, last = mean_of(rows[:3], "critic/score/mean"), mean_of(rows[-3:], "critic/score/mean")
    assert last > first + 0.25
    assert last > 0.8


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_sampling_learns_and_wastes_no_group_with_signal(toy: Toy, tmp_path: Path, seed: int) -> None:
    """Scores of everything that was generated rise from about 0.35 to above 0.9."""
    model = save_toy_model(tmp_path / "model", seed=seed)
    keys = {
        **LEARNING,
        **DAPO,
        "actor_rollout_ref.model.path": str(model),
        "trainer.seed": seed,
        "trainer.total_training_steps": 14,
        "data.val_files": str(toy.data / "val.parquet"),
    }
    result, rows = train(toy.config(tmp_path / "run", keys))
    assert mean_of(rows[:3], "reward/score/mean") < 0.5
    assert mean_of(rows[-3:], "reward/score/mean") > 0.8
    assert result.validation["val-core/toy/acc/mean@1"] == 1.0
    # What is left over in one step is used in the next, and a full step has signal in every group.
    for before, after in itertools.pairwise(rows):
        assert after["train/groups_carried_in"] == before["train/groups_carried_over"]
    full = [row for row in rows if row["train/num_gen_batches"] < 4]
    assert len(full) >= 6
    assert all(row["train/groups_with_signal"] == 8 for row in full)
    assert any(row["train/groups_carried_over"] > 0 for row in rows)
    # A step whose groups were all waiting generates nothing, and reports no scores of another step.
    assert any(row["train/num_gen_batches"] == 0 for row in rows)
    assert all(("reward/score/mean" in row) == (row["train/num_gen_batches"] > 0) for row in rows)


def test_a_reward_that_never_differs_ends_steps_at_the_limit_of_rounds(toy: Toy, tmp_path: Path) -> None:
    reward = tmp_path / "constant.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    keys = {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "score",
        "algorithm.filter_groups.max_num_gen_batches": 2,
        "custom_reward_function.path": str(reward),
        "trainer.total_training_steps": 2,
    }
    result, rows = train(toy.config(tmp_path / "run", keys))
    assert result.steps == 2
    for row in rows:
        assert row["train/num_gen_batches"] == 2
        assert row["train/groups_with_signal"] == 0
        assert row["train/groups_without_signal"] == 8
        assert row["actor/pg_loss"] == 0.0


def test_rounds_of_dynamic_sampling_may_return_different_columns(toy: Toy, tmp_path: Path) -> None:
    """As with data of two sources: what one round's reward returns, another's need not."""
    reward = tmp_path / "columns.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    number = extra_info['index']\n"
        "    own = {'even': 1.0, 'said': 'yes'} if number % 2 == 0 else {'odd': 2.0}\n"
        "    return {'score': float(len(solution_str)), **own}\n"
    )
    keys = {
        **DAPO,
        "algorithm.filter_groups.metric": "score",
        "data.gen_batch_size": 1,
        "algorithm.filter_groups.max_num_gen_batches": 8,
        "custom_reward_function.path": str(reward),
        "custom_reward_function.name": "compute_score",
        "trainer.total_training_steps": 2,
    }
    result, _ = train(toy.config(tmp_path / "run", keys))
    lines = (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text()
    assert result.steps == 2
    assert '"even": 1.0' in lines
    assert '"odd": 2.0' in lines
