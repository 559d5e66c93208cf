"""Importance weights, rejection and mismatch metrics, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dovetail.algorithms import (
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_overlong_penalty,
    compute_probs_diff_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from dovetail.algorithms.rollout_correction import interpolate_old_log_prob, interpolation_weights, off_policy_mask
from dovetail.config.rejection import REJECTION_RULES

pytestmark = pytest.mark.unit

# Ratios 4, 1/2 | 1, padding
LOG_RATIO = torch.tensor([[4.0, 0.5], [1.0, 9.0]]).log()
MASK = torch.tensor([[1, 1], [1, 0]])


def test_token_weights_are_truncated_and_masked() -> None:
    weights = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5], [1.0, 0.0]]))


def test_sequence_weights_are_products() -> None:
    weights = compute_rollout_correction_weights(LOG_RATIO, MASK, "sequence", 3.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2.0], [1.0, 0.0]]))


def test_a_range_drops_tokens_outside_it() -> None:
    weights = compute_rollout_correction_weights(LOG_RATIO, MASK, "token", "0.8_3.0")
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize(
    ("level", "expected"), [("token", [[12 / 7, 3 / 7], [6 / 7, 0.0]]), ("sequence", [[4 / 3, 4 / 3], [2 / 3, 0.0]])]
)
def test_normalised_weights_have_mean_one(level: str, expected: list[list[float]]) -> None:
    weights = compute_rollout_correction_weights(LOG_RATIO, MASK, level, 2.0, rollout_is_batch_normalize=True)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_weights_carry_no_gradient_and_survive_extremes() -> None:
    log_ratio = torch.tensor([[500.0, -500.0]], requires_grad=True)
    weights = compute_rollout_correction_weights(log_ratio, torch.ones(1, 2), "token", 1e12)
    assert not weights.requires_grad
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, "2_1", "x"])
def test_senseless_thresholds_are_refused(bad: float | str) -> None:
    with pytest.raises(ValueError, match="rollout_is_threshold"):
        compute_rollout_correction_weights(LOG_RATIO, MASK, "token", bad)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'token' or 'sequence'"):
        compute_rollout_correction_weights(LOG_RATIO, MASK, "geometric", 2.0)


K3_OF_4 = 4 - 1 - math.log(4)


@pytest.mark.parametrize(
    ("rule", "threshold", "expected"),
    [
        ("token_k1", 3.0, [[0, 1], [1, 0]]),
        ("token_k1", "0.2_1.5", [[1, 0], [1, 0]]),  # k1 is -log ratio: bounds 0.2 and 1.5 are of engine / trainer
        ("token_k2", 0.5, [[0, 1], [1, 0]]),
        ("token_k3", 0.1, [[0, 0], [1, 0]]),
        ("seq_sum_k1", 1.9, [[0, 0], [1, 0]]),
        ("seq_sum_k1", 2.1, [[1, 1], [1, 0]]),
        ("seq_mean_k1", 1.5, [[1, 1], [1, 0]]),
        ("seq_mean_k1", 1.4, [[0, 0], [1, 0]]),
        ("seq_max_k2", 0.9, [[0, 0], [1, 0]]),
        ("seq_max_k3", K3_OF_4 + 0.01, [[1, 1], [1, 0]]),
        ("seq_max_k3", K3_OF_4 - 0.01, [[0, 0], [1, 0]]),
        ("token_k1,seq_max_k2", "5.0,0.9", [[0, 0], [1, 0]]),
    ],
)
def test_rejection_by_hand(rule: str, threshold: float | str, expected: list[list[int]]) -> None:
    mask, metrics = compute_rollout_rejection_mask(LOG_RATIO, MASK, rule, threshold)
    assert mask.tolist() == expected
    assert mask.dtype == MASK.dtype
    num_rejected = int(MASK.sum() - mask.sum())
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(num_rejected / 3)
    assert metrics["rollout_rs_seq_masked_fraction"] == (0.5 if num_rejected else 0.0)


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_equal_policies_reject_nothing(rule: str) -> None:
    mask, _ = compute_rollout_rejection_mask(torch.zeros(2, 2), MASK, rule, 1.001)
    assert torch.equal(mask, MASK)


@pytest.mark.parametrize(
    ("rule", "threshold", "message"),
    [
        ("token_k9", 2.0, "use token_k1"),
        ("seq_max_k1", 2.0, "is no rejection rule"),
        ("", 2.0, "is no rejection rule"),
        ("token_k1", None, "needs bounds"),
        ("token_k2", "1_2", "one upper bound"),
        ("token_k1", "0", "neither a number"),
        ("token_k1", "-2_1", "not positive"),
        ("token_k1", "2.0_0.5", "rejects everything"),
        ("token_k1", 0.5, "rejects everything"),
        ("token_k1,token_k2,token_k3", "1,2", "2 bounds for 3 rules"),
    ],
)
def test_wrong_rejection_settings_are_explained(rule: str, threshold: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_rollout_rejection_mask(LOG_RATIO, MASK, rule, threshold)


def test_mismatch_metrics_by_hand() -> None:
    trainer = torch.tensor([[0.4, 0.2], [0.5, 1.0]]).log()
    engine = torch.tensor([[0.2, 0.4], [0.5, 0.1]]).log()
    metrics = compute_offpolicy_metrics(trainer, engine, MASK)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["k3_kl"] == pytest.approx((2 - math.log(2) - 1 + 0.5 + math.log(2) - 1) / 3, abs=1e-6)
    assert metrics["training_ppl"] == pytest.approx((0.08**-0.5 + 2) / 2, rel=1e-5)
    assert metrics["ppl_ratio"] == pytest.approx(1.0, rel=1e-5)
    assert metrics["chi2_token"] == pytest.approx((4 + 0.25 + 1) / 3 - 1, rel=1e-5)
    assert metrics["chi2_seq"] == pytest.approx(0.0, abs=1e-5)
    assert set(compute_offpolicy_metrics(trainer, None, MASK)) == {"training_ppl", "training_log_ppl"}


def test_probability_gaps_by_hand() -> None:
    trainer = torch.tensor([[0.4, 0.2], [0.5, 1.0]]).log()
    engine = torch.tensor([[0.3, 0.2], [0.5, 0.1]]).log()
    metrics = compute_probs_diff_metrics(trainer, engine, MASK)
    assert metrics["probs_diff_max"] == pytest.approx(0.1, rel=1e-5)
    assert metrics["probs_diff_mean"] == pytest.approx(0.1 / 3, rel=1e-5)
    assert 0.9 < metrics["pearson"] < 1.0
    same = compute_probs_diff_metrics(trainer, trainer, MASK)
    assert same["pearson"] == pytest.approx(1.0)
    assert "pearson" not in compute_probs_diff_metrics(trainer[:1, :1], engine[:1, :1], torch.ones(1, 1))
    assert "pearson" not in compute_probs_diff_metrics(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([[2.0, 0.5], [1.0, 0.0]])
    metrics = compute_is_metrics(weights, LOG_RATIO, MASK, "token", 2.0)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((3.5 / 3) ** 2 / (5.25 / 3), rel=1e-5)
    assert metrics["rollout_is_mean"] == pytest.approx(3.5 / 3, rel=1e-5)
    assert (metrics["rollout_is_max"], metrics["rollout_is_min"]) == (2.0, 0.5)


@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
def test_rows_that_keep_no_token_change_no_metric(rollout_is: str) -> None:
    """A failed or cut-off answer would count as perplexity 1 and weight 0 or 1."""
    trainer, engine = (
        torch.tensor([[0.4, 0.2], [0.5, 1.0], [0.9, 0.9]]).log(),
        torch.tensor([[0.2, 0.4], [0.5, 0.1], [0.1, 0.1]]).log(),
    )
    mask = torch.cat([MASK, torch.zeros(1, 2, dtype=MASK.dtype)])
    for metrics in (
        lambda rows: compute_offpolicy_metrics(trainer[rows], engine[rows], mask[rows]),
        lambda rows: compute_probs_diff_metrics(trainer[rows], engine[rows], mask[rows]),
        lambda rows: (
            compute_rollout_correction_and_rejection_mask(trainer[rows], engine[rows], mask[rows], rollout_is).metrics
        ),
    ):
        assert metrics(slice(3)) == pytest.approx(metrics(slice(2)))


def test_rows_without_a_kept_token_change_no_metric_of_rejection() -> None:
    empty = torch.cat([MASK, torch.zeros(1, 2)])
    engine = torch.full((3, 2), -3.0)
    log_ratio = torch.cat([LOG_RATIO, torch.full((1, 2), 2.0)])
    settings = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}
    found = compute_rollout_correction_and_rejection_mask(engine + log_ratio, engine, empty, **settings)
    two = engine[:2]
    expected = compute_rollout_correction_and_rejection_mask(two + LOG_RATIO, two, MASK, **settings)
    assert found.metrics == pytest.approx(expected.metrics)
    whole = compute_is_metrics(log_ratio.exp(), log_ratio, empty, "sequence", 2.0)
    assert whole == pytest.approx(compute_is_metrics(LOG_RATIO.exp(), LOG_RATIO, MASK, "sequence", 2.0))


def test_everything_at_once() -> None:
    engine = torch.full((2, 2), -3.0)
    result = compute_rollout_correction_and_rejection_mask(
        engine + LOG_RATIO, engine, MASK, "token", 2.0, True, rollout_rs="token_k1", rollout_rs_threshold=3.0
    )
    assert result.rollout_is_weights is not None
    torch.testing.assert_close(result.rollout_is_weights, torch.tensor([[12 / 7, 3 / 7], [6 / 7, 0.0]]))
    assert result.response_mask.tolist() == [[0, 1], [1, 0]]
    assert all(name.startswith("rollout_corr/") for name in result.metrics)
    assert result.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(3.5 / 3)


def test_without_settings_only_metrics_come_back() -> None:
    result = compute_rollout_correction_and_rejection_mask(LOG_RATIO - 3, LOG_RATIO - 3, MASK)
    assert result.rollout_is_weights is None
    assert result.response_mask is MASK
    assert result.metrics["rollout_corr/kl"] == 0
    with pytest.raises(ValueError, match="keeps no token"):
        compute_rollout_correction_and_rejection_mask(LOG_RATIO, LOG_RATIO, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="must have one shape"):
        compute_rollout_correction_and_rejection_mask(LOG_RATIO, LOG_RATIO[:1], MASK)


def test_overlong_penalty_by_hand() -> None:
    penalties = compute_overlong_penalty(torch.tensor([5, 6, 8, 10]), 10, buffer_length=4, penalty_factor=2.0)
    assert penalties.tolist() == [0.0, 0.0, -1.0, -2.0]
    with pytest.raises(ValueError, match="between 1 and the longest response 4"):
        compute_overlong_penalty(torch.tensor([1]), 4, buffer_length=5)


def test_interpolated_old_log_probs_follow_the_versions() -> None:
    # Step 5: the old policy is version 4, the update makes 5. alpha = (4 - v) / (5 - v); -1 was not sampled.
    versions = torch.tensor([[4, 3, 1, -1]], dtype=torch.int32)
    alpha = interpolation_weights(versions, step=5)
    assert alpha.tolist() == [pytest.approx([0.0, 1 / 2, 3 / 4, 0.0])]
    engine = torch.tensor([[-1.0, -1.0, -1.0, 0.0]])
    update = torch.tensor([[-2.0, -2.0, -3.0, 7.0]], requires_grad=True)
    old = interpolate_old_log_prob(update, engine, alpha)
    assert old.tolist() == [pytest.approx([-1.0, -1.5, -2.5, 0.0])]
    assert not old.requires_grad


def test_off_policy_masking_by_hand() -> None:
    """Mean log(engine / policy) of the rows: 0.6, 0.6, 0.4 (its last token is no response), -2, 0.5."""
    engine = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-3.0, -3.0], [-1.0, -1.0]])
    policy = torch.tensor([[-1.0, -2.2], [-1.0, -2.2], [-1.4, -90.0], [-1.0, -1.0], [-1.5, -1.5]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0]).unsqueeze(-1).expand(5, 2)
    found = off_policy_mask(policy, engine, advantages, mask, 0.5)
    assert found.tolist() == [[True, True]] + [[False, False]] * 4
    # A critic gives every token its own advantage: of a far response only the negative ones are left out.
    mixed = torch.tensor([[1.0, -1.0]]).expand(5, 2)
    assert off_policy_mask(policy, engine, mixed, mask, 0.5)[0].tolist() == [False, True]
