"""Rows that keep no token count nowhere, and what is reported of weights describes the weights that are used."""

from __future__ import annotations

import math

import pytest
import torch

from dovetail.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_policy_loss_geo_mean,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_rejection_mask,
    kl_penalty,
)
from dovetail.algorithms.masked import moved_to_kept

pytestmark = pytest.mark.unit

MASK = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])  # two rows of four keep a token


def test_the_kl_of_masked_rows_is_no_zero_in_the_mean_nor_a_step_of_the_controller() -> None:
    gap = torch.tensor([[0.2, 0.4], [9.0, 9.0], [0.5, 9.0], [9.0, 9.0]])
    controller = AdaptiveKLController(init_kl_coef=1.0, target_kl=0.2, horizon=100)
    _, metrics = apply_kl_penalty(torch.zeros(4, 2), gap, torch.zeros(4, 2), MASK, controller)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.3 + 0.5) / 2)
    # The error 0.4 / 0.2 - 1 is limited to 0.2; two rows were seen.
    assert controller.value == pytest.approx(1.0 * (1 + 0.2 * 2 / 100))


def test_a_batch_without_a_kept_token_leaves_the_controller_alone() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=0.2, horizon=1)
    ones = torch.ones(2, 2)
    _, metrics = apply_kl_penalty(ones, ones, ones * 0, ones * 0, controller)
    assert (metrics["actor/reward_kl_penalty"], controller.value) == (0.0, 0.5)
    assert apply_kl_penalty(ones, ones, ones * 0, ones * 0, FixedKLController(0.1))[0].tolist() == ones.tolist()


def test_geo_mean_is_the_mean_over_rows_that_keep_a_token() -> None:
    columns = {
        "old_log_prob": torch.full((4, 2), -1.0),
        "log_prob": torch.full((4, 2), -1.0),
        "advantages": torch.tensor([[1.0, 1.0], [7.0, 7.0], [3.0, 3.0], [7.0, 7.0]]),
    }
    loss, _ = compute_policy_loss_geo_mean(**columns, response_mask=MASK)
    assert loss.item() == pytest.approx(-2.0)
    kept = {name: column[[0, 2]] for name, column in columns.items()}
    assert loss == compute_policy_loss_geo_mean(**kept, response_mask=MASK[[0, 2]])[0]


def test_icepops_metrics_are_those_of_the_weights_it_uses() -> None:
    engine = torch.zeros(1, 3) - 3.0
    trainer = engine + torch.tensor([[1.0, 10.0, 0.01]]).log()
    found = compute_rollout_correction_and_rejection_mask(
        trainer, engine, torch.ones(1, 3), rollout_is="token", rollout_is_threshold="0.5_5.0"
    )
    assert found.rollout_is_weights is not None
    torch.testing.assert_close(found.rollout_is_weights, torch.tensor([[1.0, 0.0, 0.0]]))
    metrics = {name.removeprefix("rollout_corr/rollout_is_"): value for name, value in found.metrics.items()}
    # One of three tokens counts: (1/3)^2 / (1/3).
    assert metrics["eff_sample_size"] == pytest.approx(1 / 3)
    assert metrics["mean"] == pytest.approx(1 / 3)
    assert metrics["std"] == pytest.approx(math.sqrt(1 / 3 - 1 / 9))
    assert (metrics["max"], metrics["min"]) == (pytest.approx(1.0), 0.0)
    assert metrics["seq_mean"] == pytest.approx(1 / 3)
    # How often the bounds bite is counted before they do.
    assert metrics["ratio_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["ratio_fraction_low"] == pytest.approx(1 / 3)
    assert metrics["oob_ratio"] == pytest.approx(2 / 3)


def test_truncated_weights_are_described_as_truncated() -> None:
    weights = torch.tensor([[4.0, 0.25]])
    metrics = compute_is_metrics(weights, weights.log(), torch.ones(1, 2), "token", 2.0)
    assert metrics["rollout_is_mean"] == pytest.approx((2 + 0.25) / 2)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((2.25 / 2) ** 2 / ((4 + 0.0625) / 2))
    assert metrics["rollout_is_seq_fraction_high"] == 1.0, "the mean before truncation, 2.125, is above 2"
    assert "rollout_is_oob_ratio" not in metrics


def test_dropping_every_weight_leaves_no_sample() -> None:
    weights = torch.full((1, 2), 100.0)
    metrics = compute_is_metrics(weights, weights.log(), torch.ones(1, 2), "token", 2.0, 0.5)
    assert metrics["rollout_is_eff_sample_size"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_k3_is_never_negative_for_policies_that_nearly_agree() -> None:
    """float32: exp(x) - x - 1 of x near 1e-4 is rounding, of either sign."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = 1e-4 * torch.randn(4, 512, generator=generator)
    engine = -torch.rand(4, 512, generator=generator)
    ones, zeros = torch.ones(4, 512), torch.zeros(4, 512)
    exact = float((log_ratio.double().expm1() - log_ratio.double()).mean())
    assert (kl_penalty(zeros, log_ratio, "k3") >= 0).all()
    assert kl_penalty(zeros, log_ratio, "k3").mean().item() == pytest.approx(exact, rel=1e-2)
    assert compute_offpolicy_metrics(engine + log_ratio, engine, ones)["k3_kl"] >= 0
    metrics = compute_offpolicy_metrics(log_ratio, zeros, ones)
    assert metrics["k3_kl"] == pytest.approx(exact, rel=1e-2)
    _, metrics = compute_rollout_rejection_mask(log_ratio, ones, "token_k3", 1.0)
    assert metrics["rollout_rs_token_k3_min"] >= 0


def test_values_of_masked_tokens_go_to_the_kept_token_before_them_or_to_the_first() -> None:
    values = torch.tensor([[0.0, 2.0, 0.0, 5.0], [3.0, 0.0, 4.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    expected = [[0.0, 7.0, 0.0, 0.0], [0.0, 3.0, 4.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]]
    assert moved_to_kept(values, mask).tolist() == expected
