"""Optimal token baseline, GDPO and DPPO by hand; what each does where others would do something else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dovetail.algorithms import (
    agg_loss,
    compute_gdpo_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
)

pytestmark = pytest.mark.unit

UID = np.array(["a", "a"], dtype=object)


def test_the_optimal_baseline_weighs_returns_by_the_energy_of_their_path() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    log_probs = torch.tensor([[0.5, 0.25], [1.0, 0.5]]).log()
    squares = torch.tensor([[0.5, 0.5], [1.0, 0.5]])
    # 1 - 2p + sum p^2: row 0 has 0.5, 1.0 (added up 0.5, 1.5); row 1 has 0, 0.5 (0, 0.5).
    advantages, returns = compute_optimal_token_baseline_advantage(
        rewards, torch.ones(2, 2), UID, log_probs, squares, epsilon=0.0
    )
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.25], [-1.0, -0.75]]))


def test_importance_weights_enter_squared() -> None:
    rewards, ones = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)
    log_probs, squares = torch.full((2, 1), math.log(0.5)), torch.full((2, 1), 0.5)
    weights = torch.tensor([[2.0], [1.0]])
    advantages, _ = compute_optimal_token_baseline_advantage(
        rewards, ones, UID, log_probs, squares, rollout_is_weights=weights, epsilon=0.0
    )
    torch.testing.assert_close(advantages, torch.tensor([[1 - 0.8], [-0.8]]))


def test_the_rounding_of_nearly_certain_tokens_makes_no_huge_baseline() -> None:
    # p = 1 on both rows, with an error of the size that a head in float32 makes at logits of about 20.
    squares = torch.tensor([[1 + 1.0e-6], [1 - 0.99e-6]])
    advantages, _ = compute_optimal_token_baseline_advantage(
        torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), UID, torch.zeros(2, 1), squares
    )
    torch.testing.assert_close(advantages, torch.tensor([[1.0], [0.0]]))  # no weight, no baseline


def test_a_lone_tail_is_its_own_baseline_unless_it_is_handled() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    inputs = (rewards, mask, UID, torch.full((2, 3), math.log(0.5)), torch.full((2, 3), 0.5))
    plain, _ = compute_optimal_token_baseline_advantage(*inputs)
    handled, _ = compute_optimal_token_baseline_advantage(*inputs, handle_zero_tail=True)
    assert plain[0, 1:].abs().max() < 1e-6
    assert handled[0, 1:].tolist() == [1.0, 1.0]
    assert plain[:, 0].tolist() == handled[:, 0].tolist()


def test_a_row_that_keeps_nothing_is_no_company() -> None:
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    for estimate in (
        compute_optimal_token_baseline_advantage,
        compute_multi_turn_optimal_token_baseline_advantage,
    ):
        advantages, _ = estimate(rewards, mask, UID, torch.full((2, 2), -1.0), torch.full((2, 2), 0.5))
        assert advantages.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_with_tools_positions_are_those_the_policy_wrote() -> None:
    """Row 0 has tool output at its first place; its first own token meets the first token of row 1."""
    mask = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    log_probs, squares = torch.full((2, 2), math.log(0.5)), torch.full((2, 2), 0.5)
    turns, _ = compute_multi_turn_optimal_token_baseline_advantage(rewards, mask, UID, log_probs, squares, epsilon=0.0)
    torch.testing.assert_close(turns, torch.tensor([[0.0, 0.5], [-0.5, 0.0]]))
    plain, _ = compute_optimal_token_baseline_advantage(rewards, mask, UID, log_probs, squares)
    assert plain.abs().max() < 1e-6, "by place alone the two never meet"


def test_gdpo_hears_the_quiet_reward() -> None:
    """Rewards of 0 to 100 and of 0 to 1 that disagree: GRPO follows the loud one, GDPO neither."""
    components = torch.tensor([[100.0, 0.0], [0.0, 1.0]])
    rewards = components.sum(dim=1, keepdim=True)
    mask = torch.ones(2, 1)
    loud, _ = compute_grpo_outcome_advantage(rewards, mask, UID)
    both, _ = compute_gdpo_outcome_advantage(rewards, mask, UID, reward_components=components)
    assert loud[0] > 0.5
    assert both.abs().max() < 0.05
    weighted, _ = compute_gdpo_outcome_advantage(
        rewards, mask, UID, reward_components=components, gdpo_reward_weights=[1.0, 3.0]
    )
    assert weighted[1] > 0.5
    with pytest.raises(ValueError, match="1 numbers for 2 rewards"):
        compute_gdpo_outcome_advantage(rewards, mask, UID, reward_components=components, gdpo_reward_weights=[1.0])


def test_gdpo_of_one_reward_is_grpo_whitened() -> None:
    rewards = torch.tensor([[1.0], [0.0], [3.0], [1.0]])
    uid = np.array(list("aabb"), dtype=object)
    grpo, _ = compute_grpo_outcome_advantage(rewards, torch.ones(4, 1), uid)
    gdpo, _ = compute_gdpo_outcome_advantage(rewards, torch.ones(4, 1), uid)
    torch.testing.assert_close(gdpo, (grpo - grpo.mean()) / grpo.std(), atol=1e-5, rtol=0)


def test_dppo_trusts_a_rare_token_whose_ratio_ppo_would_clip() -> None:
    old, new = torch.tensor([[0.001, 0.5]]).log(), torch.tensor([[0.003, 0.8]]).log().requires_grad_()
    ones = torch.ones(1, 2)
    loss, metrics = compute_policy_loss_dppo_tv(old, new, ones, ones, clip_ratio=0.2, loss_agg_mode="token-sum")
    loss.backward()
    # The rare token moved by 0.002 and has ratio 3; the likely one moved by 0.3, beyond 0.2.
    assert new.grad is not None
    assert new.grad[0, 0] == pytest.approx(-3.0, rel=1e-4)
    assert new.grad[0, 1] == 0
    assert metrics["actor/pg_clipfrac"] == 0.5


@pytest.mark.parametrize(("advantage", "trusted"), [(1.0, False), (-1.0, True)])
def test_dppo_asks_only_in_the_direction_of_the_advantage(advantage: float, trusted: bool) -> None:
    old, ones = torch.tensor([[0.1]]).log(), torch.ones(1, 1)
    for loss_fn in (compute_policy_loss_dppo_tv, compute_policy_loss_dppo_kl):
        new = torch.tensor([[0.9]]).log().requires_grad_()
        loss, metrics = loss_fn(old, new, advantage * ones, ones, clip_ratio=0.2)
        loss.backward()
        assert new.grad is not None
        assert bool(new.grad.abs().sum() > 0) == trusted
        assert metrics["actor/pg_clipfrac"] == (0.0 if trusted else 1.0)


def test_dppo_truncates_the_ratio_and_says_how_often() -> None:
    old, ones = torch.tensor([[0.001]]).log(), torch.ones(1, 1)
    new = torch.tensor([[0.1]]).log().requires_grad_()
    loss, metrics = compute_policy_loss_dppo_kl(old, new, ones, ones, clip_ratio=1.0, clip_ratio_c=20.0)
    loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-20.0)
    assert metrics["actor/pg_clipfrac_lower"] == 1.0


def test_token_sum_adds_kept_tokens_up() -> None:
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, float("nan")]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert agg_loss(losses, mask, "token-sum").item() == 7.0
