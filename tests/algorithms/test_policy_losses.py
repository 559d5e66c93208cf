"""Losses on numbers small enough to check by hand, and on padding that must not matter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dovetail.algorithms import (
    LOSS_AGG_MODES,
    BatchCounts,
    agg_loss,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
    compute_policy_loss_vespo,
    compute_value_loss,
    count_batch,
    get_policy_loss_fn,
    policy_loss_names,
)

pytestmark = pytest.mark.unit


def _inputs(ratios: list[float], advantages: list[float], log_prob: float = -1.0) -> dict[str, torch.Tensor]:
    """One row; `ratios` are new / old."""
    new = torch.full((1, len(ratios)), log_prob, dtype=torch.float64)
    return {
        "old_log_prob": new - torch.tensor([ratios], dtype=torch.float64).log(),
        "log_prob": new.clone().requires_grad_(),
        "advantages": torch.tensor([advantages], dtype=torch.float64),
        "response_mask": torch.ones(1, len(ratios)),
    }


def _check(
    result: tuple[torch.Tensor, dict[str, torch.Tensor]], inputs: dict[str, Any], loss: float, grad: list[float]
) -> dict[str, float]:
    result[0].backward()
    assert result[0].item() == pytest.approx(loss)
    torch.testing.assert_close(inputs["log_prob"].grad, torch.tensor([grad], dtype=torch.float64))
    assert not any(value.requires_grad or value.dim() for value in result[1].values())
    return {name: float(value) for name, value in result[1].items()}


def test_vanilla_by_hand() -> None:
    # clipped gain; free; clipped loss; loss of 5 held at c = 3
    inputs = _inputs([1.5, 0.5, 0.5, 5.0], [1.0, 1.0, -1.0, -1.0])
    result = compute_policy_loss_vanilla(**inputs, clip_ratio=0.2, clip_ratio_c=3.0)
    metrics = _check(result, inputs, (-1.2 - 0.5 + 0.8 + 3.0) / 4, [0.0, -0.5 / 4, 0.0, 0.0])
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert metrics["actor/pg_clipfrac_lower"] == 0.25
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 0.5 * 5.0) / 4)


def test_clip_higher_leaves_more_room_above() -> None:
    inputs = _inputs([1.25, 1.25], [1.0, 1.0])
    result = compute_policy_loss_vanilla(**inputs, clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert _check(result, inputs, -1.25, [-0.625, -0.625])["actor/pg_clipfrac"] == 0


def test_dual_clip_bound_of_one_or_less_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_ratio_c=1\.0 must exceed 1"):
        compute_policy_loss_vanilla(**_inputs([1.0], [1.0]), clip_ratio_c=1.0)


def test_gspo_by_hand() -> None:
    ratio = math.exp(0.1)
    inputs = _inputs([math.exp(0.2), 1.0], [1.0, 1.0])
    result = compute_policy_loss_gspo(**inputs, clip_ratio=0.5)
    _check(result, inputs, -ratio, [-ratio / 2, -ratio / 2])


def test_gspo_clips_the_whole_sequence() -> None:
    inputs = _inputs([math.exp(0.2), 1.0], [1.0, 1.0])
    metrics = _check(compute_policy_loss_gspo(**inputs, clip_ratio=4e-4), inputs, -1.0004, [0.0, 0.0])
    assert metrics["actor/pg_clipfrac"] == 1.0


def test_cispo_by_hand() -> None:
    inputs = _inputs([1.5, 1.0], [2.0, -1.0])
    result = compute_policy_loss_cispo(**inputs, clip_ratio_low=0.2, clip_ratio_high=0.28)
    metrics = _check(result, inputs, (1.28 * 2 - 1) / 2, [-1.28, 0.5])
    assert metrics["actor/pg_clipfrac"] == 0.5


def test_geo_mean_by_hand() -> None:
    inputs = _inputs([math.exp(0.1), math.exp(0.9)], [1.0, 1.0])
    result = compute_policy_loss_geo_mean(**inputs, clip_ratio=0.4)
    value = math.exp((0.1 + 0.4) / 2)
    metrics = _check(result, inputs, -value, [-value / 2, 0.0])
    assert (metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]) == (0.5, 0.0)


def test_geo_mean_takes_the_geometric_mean_of_rollout_weights() -> None:
    inputs = _inputs([1.0, 1.0], [1.0, 1.0])
    loss, _ = compute_policy_loss_geo_mean(**inputs, rollout_is_weights=torch.tensor([[0.5, 2.0]]))
    assert loss.item() == pytest.approx(-1.0)


def test_sapo_by_hand() -> None:
    # At ratio 1 the gate is 2 / tau and its slope 1, whatever the temperature.
    inputs = _inputs([1.0, 1.0], [1.0, -1.0])
    result = compute_policy_loss_sapo(**inputs, tau_pos=1.0, tau_neg=2.0)
    _check(result, inputs, (-2.0 + 1.0) / 2, [-0.5, 0.5])


def test_gpg_and_reinforce_by_hand() -> None:
    inputs = _inputs([1.5, 0.5], [2.0, -1.0])
    assert _check(compute_policy_loss_gpg(**inputs), inputs, 0.5, [-1.0, 0.5]) == {}
    inputs = _inputs([1.5, 0.5], [2.0, -1.0])
    weights = torch.tensor([[0.5, 3.0]])
    metrics = _check(
        compute_policy_loss_reinforce(**inputs, rollout_is_weights=weights), inputs, 2 * 0.5 - 3, [-1.0, 3.0]
    )
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(0.75) / 2)


def test_dro_by_hand() -> None:
    inputs = _inputs([math.exp(0.5)], [2.0])
    _check(compute_policy_loss_dro(**inputs, dro_beta=0.1), inputs, 2.0 + 0.05 * 0.25, [-2.0 + 0.1 * 0.5])


def test_vespo_by_hand() -> None:
    """W = 1.5 x 0.8 = 1.2 for both tokens; the first has a positive advantage, the second a negative one."""
    inputs = _inputs([1.5, 0.8], [2.0, -1.0])
    positive, negative = 1.2**2 * math.exp(-3 * 0.2), 1.2**3 * math.exp(-2 * 0.2)
    result = compute_policy_loss_vespo(**inputs)
    log_probs = inputs["log_prob"].detach().flatten().tolist()
    loss = (-positive * 2.0 * log_probs[0] + negative * log_probs[1]) / 2
    metrics = _check(result, inputs, loss, [-positive, negative / 2])
    assert metrics["actor/vespo_weight"] == pytest.approx((positive + negative) / 2)
    # On-policy it is REINFORCE.
    inputs = _inputs([1.0, 1.0], [2.0, -1.0])
    compute_policy_loss_vespo(**inputs)[0].backward()
    assert inputs["log_prob"].grad is not None
    assert inputs["log_prob"].grad.flatten().tolist() == pytest.approx([-1.0, 0.5])


def test_vespo_leaves_out_sequences_that_are_far_and_stays_finite() -> None:
    for ratio in (1e-30, 1e30):
        inputs = _inputs([ratio, ratio], [1.0, -1.0])
        loss, metrics = compute_policy_loss_vespo(**inputs)
        loss.backward()
        assert torch.isfinite(loss)
        assert metrics["actor/vespo_weight"] < 1e-12


def _covariance_inputs(ratio: float) -> dict[str, torch.Tensor]:
    """Covariances 0.55, 0.35, -0.35, -0.15; only the first token has moved."""
    log_prob = torch.tensor([[-0.1, -1.0, -1.0, -0.5]], dtype=torch.float64)
    moved = torch.tensor([[math.log(ratio), 0.0, 0.0, 0.0]], dtype=torch.float64)
    return {
        "old_log_prob": log_prob - moved,
        "log_prob": log_prob.clone().requires_grad_(),
        "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64),
        "response_mask": torch.ones(1, 4),
    }


def test_kl_cov_by_hand() -> None:
    inputs = _covariance_inputs(math.exp(0.3))
    result = compute_policy_loss_kl_cov(**inputs, kl_cov_ratio=0.25, ppo_kl_coef=0.5)
    loss = (-math.exp(0.3) + 0.5 * 0.3 + 1 - 1 + 1) / 4
    metrics = _check(result, inputs, loss, [(-math.exp(0.3) + 0.5) / 4, 0.25, -0.25, 0.25])
    assert metrics["actor/ppo_kl"] == pytest.approx(0.3 / 4)


def test_clip_cov_by_hand() -> None:
    inputs = _covariance_inputs(1.0)
    result = compute_policy_loss_clip_cov(**inputs, clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=5.0)
    metrics = _check(result, inputs, (0 + 1 - 1 + 1) / 4, [0.0, 0.25, -0.25, 0.25])
    assert metrics["actor/pg_clipfrac"] == 0.25


def test_clip_cov_leaves_tokens_that_ppo_clips() -> None:
    inputs = _covariance_inputs(1.5)
    _, metrics = compute_policy_loss_clip_cov(**inputs, clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=5.0)
    assert metrics["actor/pg_clipfrac"] == 0


def test_clip_cov_draw_is_a_function_of_the_seed() -> None:
    inputs = _covariance_inputs(1.0)
    settings: dict[str, Any] = {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.3, "clip_cov_ub": 5.0}
    losses = [compute_policy_loss_clip_cov(**inputs, **settings, seed=seed)[0].item() for seed in range(12)]
    again = [compute_policy_loss_clip_cov(**inputs, **settings, seed=seed)[0].item() for seed in range(12)]
    assert losses == again
    assert len(set(losses)) == 2  # either of the two candidates


def test_value_loss_by_hand() -> None:
    vpreds = torch.tensor([[2.0, 1.0, 77.0]], requires_grad=True)
    values, returns = torch.zeros(1, 3), torch.tensor([[1.0, 1.0, math.nan]])
    loss, clipfrac = compute_value_loss(vpreds, returns, values, torch.tensor([[1, 1, 0]]), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.0 + 0.25) / 2)
    assert clipfrac.item() == 0.5
    assert vpreds.grad is not None
    assert vpreds.grad.tolist() == [[0.5, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3) / 3),
        ("seq-mean-token-sum", (3 + 3) / 2),
        ("seq-mean-token-mean", (1.5 + 3) / 2),
        ("seq-mean-token-sum-norm", (3 + 3) / 2 / 4),
    ],
)
def test_agg_loss_by_hand(mode: str, expected: float) -> None:
    losses = torch.tensor([[1.0, 2.0, 9.0, 9.0], [3.0, 9.0, 9.0, 9.0], [9.0, 9.0, math.nan, 9.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert agg_loss(losses, mask, mode).item() == pytest.approx(expected)


def test_a_fixed_horizon_replaces_the_width() -> None:
    loss = agg_loss(torch.ones(2, 4), torch.ones(2, 4), "seq-mean-token-sum-norm", loss_scale_factor=16)
    assert loss.item() == pytest.approx(4 / 16)


def test_counts_add_up() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    assert count_batch(mask) == BatchCounts(num_tokens=4, num_sequences=2, num_rows=3, response_width=3)
    assert sum([count_batch(mask[:1]), count_batch(mask[1:, :2])]) == BatchCounts(3, 2, 3, 3)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", policy_loss_names())
def test_padding_reaches_neither_loss_nor_gradient(loss_mode: str, mode: str) -> None:
    def run(padding: float) -> tuple[float, torch.Tensor]:
        mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
        padded = mask == 0
        log_prob = torch.tensor([[-1.0, -0.5, 0], [-2.0, 0, 0], [0, 0, 0]]).masked_fill(padded, padding)
        old = (log_prob - 0.1).masked_fill(padded, -padding)
        advantages = torch.tensor([[1.0, -1.0, 0], [0.5, 0, 0], [0, 0, 0]]).masked_fill(padded, padding)
        log_prob.requires_grad_()
        loss, metrics = get_policy_loss_fn(loss_mode)(old, log_prob, advantages, mask, loss_agg_mode=mode, seed=0)
        loss.backward()
        assert log_prob.grad is not None
        assert all(torch.isfinite(value) for value in metrics.values())
        return loss.item(), log_prob.grad

    clean, dirty = run(0.0), run(math.nan)
    assert dirty[0] == clean[0]
    assert math.isfinite(clean[0])
    torch.testing.assert_close(dirty[1], clean[1], rtol=0, atol=0)


@pytest.mark.parametrize("loss_mode", policy_loss_names())
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_batch_without_tokens_costs_nothing(loss_mode: str, mode: str) -> None:
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    loss, metrics = get_policy_loss_fn(loss_mode)(
        torch.full((2, 3), -1.0), log_prob, torch.ones(2, 3), torch.zeros(2, 3), loss_agg_mode=mode
    )
    loss.backward()
    assert loss.item() == 0
    assert log_prob.grad is not None
    assert (log_prob.grad == 0).all()
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_mode", policy_loss_names())
def test_an_abandoned_token_does_not_overflow(loss_mode: str, advantage: float) -> None:
    old, log_prob = torch.tensor([[-120.0], [-1.0]]), torch.tensor([[-1.0], [-150.0]], requires_grad=True)
    loss, _ = get_policy_loss_fn(loss_mode)(old, log_prob, torch.full((2, 1), advantage), torch.ones(2, 1))
    loss.backward()
    assert torch.isfinite(loss)
    assert log_prob.grad is not None
    assert torch.isfinite(log_prob.grad).all()


@pytest.mark.parametrize("loss_mode", policy_loss_names())
def test_bfloat16_log_probs_are_computed_in_float32(loss_mode: str) -> None:
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    log_prob = torch.tensor([[-1.0078125, -2.0]], dtype=torch.bfloat16)
    low, low_metrics = get_policy_loss_fn(loss_mode)(old, log_prob, torch.ones(1, 2), torch.ones(1, 2))
    full, full_metrics = get_policy_loss_fn(loss_mode)(
        old.float(), log_prob.float(), torch.ones(1, 2), torch.ones(1, 2)
    )
    assert low.dtype == torch.float32
    assert low == full
    assert low_metrics == full_metrics
