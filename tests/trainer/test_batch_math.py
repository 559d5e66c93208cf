"""The driver's arithmetic: what a row without a score, a cut-off answer, a KL or a mismatch does to a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dovetail.algorithms import get_kl_controller
from dovetail.config.algorithm import AlgorithmConfig
from dovetail.protocol import DataProto
from dovetail.rewards.errors import RewardError
from dovetail.trainer.batch_math import (
    add_advantages,
    add_rewards,
    correct_rollout,
    mask_failed,
    mask_truncated,
    with_baseline_failures,
)

pytestmark = pytest.mark.unit

ESTIMATORS = (
    *("gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo"),
    *("gpg", "max_rl"),
)
WIDTH = 3


def batch_of(scores: list[float], uids: list[str], **columns: Any) -> DataProto:
    """Answers of three tokens whose score is on the last one."""
    rows = len(scores)
    placed = torch.zeros(rows, WIDTH)
    placed[:, -1] = torch.tensor(scores)
    tensors: dict[str, torch.Tensor] = {
        "token_level_scores": placed,
        "token_level_rewards": placed.clone(),
        "response_mask": torch.ones(rows, WIDTH, dtype=torch.long),
        "reward_failed": torch.zeros(rows, dtype=torch.bool),
        "values": torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH),
        "reward_baselines": torch.full((rows,), 0.5),
    }
    others: dict[str, Any] = {"uid": np.array(uids, dtype=object)}
    for name, column in columns.items():
        (tensors if isinstance(column, torch.Tensor) else others)[name] = column
    return DataProto.from_dict(tensors, others)


def advantages(batch: DataProto, estimator: str = "grpo", n: int = 4) -> torch.Tensor:
    return add_advantages(batch, AlgorithmConfig(adv_estimator=estimator), num_repeat=n).tensors["advantages"]


def flags(*rows: int, count: int = 8) -> torch.Tensor:
    found = torch.zeros(count, dtype=torch.bool)
    found[list(rows)] = True
    return found


SCORES, UIDS = [1.0, 0.0, 3.0, 2.0, 0.5, 0.5, 1.0, 0.25], ["a"] * 4 + ["b"] * 4


def test_grpo_advantages_match_the_formula() -> None:
    # Group a: mean 1.5, sample deviation sqrt(5/3).
    found = advantages(batch_of(SCORES, UIDS))[:4, 0]
    expected = (torch.tensor([1.0, 0.0, 3.0, 2.0]) - 1.5) / (5 / 3) ** 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_failed_row_changes_no_other_rows_advantage(estimator: str) -> None:
    """Whatever stands in the score of a row that failed, and as if the row had never been there."""
    rows = [row for row in range(8) if row != 2]
    without = batch_of(SCORES, UIDS).select_idxs(rows)
    for garbage in (0.0, 100.0):
        scores = [*SCORES[:2], garbage, *SCORES[3:]]
        batch = mask_failed(batch_of(scores, UIDS, reward_failed=flags(2)))
        found = advantages(batch, estimator)
        assert torch.equal(found[2], torch.zeros(WIDTH))
        assert torch.equal(found[rows], advantages(without, estimator))


@pytest.mark.parametrize(
    "estimator", ["grpo", "max_rl", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
)
def test_the_last_scored_answer_of_a_group_has_nothing_to_be_compared_with(estimator: str) -> None:
    batch = mask_failed(batch_of(SCORES, UIDS, reward_failed=flags(0, 1, 3)))
    found = advantages(batch, estimator)
    assert torch.equal(found[:4], torch.zeros(4, WIDTH))
    assert torch.isfinite(found).all()
    assert found[4:].abs().sum() > 0


def test_a_failed_row_leaves_the_loss_and_keeps_its_group_id() -> None:
    batch = mask_failed(batch_of(SCORES, UIDS, reward_failed=flags(5)))
    assert batch.tensors["response_mask"].sum(dim=1).tolist() == [3, 3, 3, 3, 3, 0, 3, 3]
    assert batch.non_tensor_batch["uid"].tolist() == UIDS


def test_a_failed_greedy_answer_fails_the_rows_it_is_the_baseline_of() -> None:
    batch = batch_of(SCORES, UIDS, reward_failed=flags(0), baseline_failed=flags(4, 5, 6, 7))
    assert with_baseline_failures(batch).tensors["reward_failed"].tolist() == [True, *[False] * 3, *[True] * 4]


def test_truncated_answers_leave_the_loss_and_are_counted() -> None:
    reasons = np.array(["stop", "length", "stop", "stop", "length", "stop", "stop", "stop"], dtype=object)
    batch, share = mask_truncated(batch_of(SCORES, UIDS, finish_reason=reasons))
    assert share == 0.25
    assert batch.tensors["response_mask"].sum(dim=1).tolist() == [3, 0, 3, 3, 0, 3, 3, 3]


def test_kl_is_taken_from_the_reward_of_every_token_and_steers_its_coefficient() -> None:
    old = torch.full((8, WIDTH), -1.0)
    ref = torch.full((8, WIDTH), -1.5)
    batch = batch_of(SCORES, UIDS, old_log_probs=old, ref_log_prob=ref)
    algorithm = AlgorithmConfig(
        use_kl_in_reward=True,
        kl_penalty="kl",
        kl_ctrl={"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.1, "horizon": 100},
    )
    controller = get_kl_controller(algorithm.kl_ctrl)
    found, metrics = add_rewards(batch, algorithm, controller)
    torch.testing.assert_close(found.tensors["token_level_rewards"], batch.tensors["token_level_scores"] - 0.1)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.2)
    # 0.5 is far above the target: the error is limited to 20%, over 8 of 100 sequences.
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 8 / 100))


def test_without_kl_the_rewards_are_the_scores() -> None:
    batch = batch_of(SCORES, UIDS)
    found, metrics = add_rewards(batch, AlgorithmConfig(), get_kl_controller(AlgorithmConfig().kl_ctrl))
    assert torch.equal(found.tensors["token_level_rewards"], batch.tensors["token_level_scores"])
    assert metrics == {}


def mismatch(gap: float) -> dict[str, torch.Tensor]:
    """Engine and trainer agree but in row 0."""
    old = torch.full((8, WIDTH), -1.0)
    rollout = old.clone()
    rollout[0] -= gap
    return {"old_log_probs": old, "rollout_log_probs": rollout}


def test_without_a_correction_the_gap_is_only_reported() -> None:
    batch = batch_of(SCORES, UIDS, **mismatch(1.0))
    found, metrics = correct_rollout(batch, AlgorithmConfig())
    assert found is batch
    # One row of eight is one nat less likely under the engine: KL(engine, trainer) estimated by its mean log-ratio.
    assert metrics["rollout_corr/kl"] == pytest.approx(-1 / 8)


def test_importance_weights_are_cut_at_the_threshold() -> None:
    algorithm = AlgorithmConfig(rollout_correction={"rollout_is": "token", "rollout_is_threshold": 2.0})
    found, metrics = correct_rollout(batch_of(SCORES, UIDS, **mismatch(1.0)), algorithm)
    weights = found.tensors["rollout_is_weights"]
    assert weights[0].tolist() == [2.0] * WIDTH  # e cut to 2
    assert torch.equal(weights[1:], torch.ones(7, WIDTH))
    assert any(name.startswith("rollout_corr/") for name in metrics)


def test_rejected_rows_leave_the_mask() -> None:
    algorithm = AlgorithmConfig(rollout_correction={"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.1})
    found, _ = correct_rollout(batch_of(SCORES, UIDS, **mismatch(1.0)), algorithm)
    assert found.tensors["response_mask"].sum(dim=1).tolist() == [0, *[3] * 7]


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_a_score_on_a_rejected_token_counts_for_the_tokens_before_it(estimator: str) -> None:
    engine = torch.full((2, WIDTH), -1.0)
    trainer = engine.clone()
    trainer[0, -1] -= 5.0
    batch = batch_of([1.0, -1.0], ["a", "b"], old_log_probs=trainer, rollout_log_probs=engine)
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    algorithm = AlgorithmConfig(adv_estimator=estimator, rollout_correction=correction)
    corrected, _ = correct_rollout(batch, algorithm)
    assert corrected.tensors["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    returns = add_advantages(corrected, algorithm, num_repeat=1).tensors["returns"]
    torch.testing.assert_close(returns[0, :2], torch.ones(2))
    torch.testing.assert_close(returns[1], -torch.ones(3))


@pytest.mark.parametrize(
    "correction", [{}, {"rollout_is": "token"}, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2}]
)
def test_a_batch_without_a_token_to_train_on_has_nothing_to_correct(correction: dict[str, Any]) -> None:
    batch = batch_of(SCORES, UIDS, **mismatch(1.0))
    batch.tensors["response_mask"].zero_()
    found, metrics = correct_rollout(batch, AlgorithmConfig(rollout_correction=correction))
    assert found is batch
    assert metrics == {}


def test_nothing_is_corrected_without_the_engines_log_probs() -> None:
    batch = batch_of(SCORES, UIDS)
    found, metrics = correct_rollout(batch, AlgorithmConfig())
    assert found is batch
    assert metrics == {}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "names 'format', which the reward function did not return; it returned score. Return 'format'"),
        (
            {"format": np.array([1.0, np.nan])},
            "names 'format', which is no number for 1 of 2 responses .first nan",
        ),
        ({"format": np.array(["good", "bad"], dtype=object)}, "no number for 2 of 2 responses .first 'good'"),
    ],
)
def test_gdpo_names_the_reward_that_is_missing(columns: dict[str, Any], message: str) -> None:
    batch = batch_of([1.0, 0.0], ["a", "a"], score=np.array([1.0, 0.0]), **columns)
    algorithm = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["score", "format"])
    with pytest.raises(RewardError, match=message):
        add_advantages(batch, algorithm, num_repeat=2)


def test_gdpo_takes_numpys_numbers() -> None:
    numbers = np.array([np.float32(1.0), np.bool_(False)], dtype=object)
    batch = batch_of([1.0, 0.0], ["a", "a"], score=np.array([1.0, 0.0]), format=numbers)
    algorithm = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["score", "format"])
    found = add_advantages(batch, algorithm, num_repeat=2)
    assert found.tensors["advantages"][0].max() > 0
