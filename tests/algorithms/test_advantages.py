"""Estimators on numbers small enough to check by hand, and on the edges: alone, equal, masked out, not finite."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dovetail.algorithms import (
    adv_estimator_names,
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_max_rl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
    masked_whiten,
)

pytestmark = pytest.mark.unit

GROUP_ESTIMATORS = ("grpo", "max_rl", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def _outcome(scores: list[float], lengths: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Rows whose whole reward sits on their last token."""
    lengths = lengths or [1] * len(scores)
    width = max(*lengths, 1)
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).float()
    rewards = torch.zeros(len(scores), width)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, max(length - 1, 0)] = score
    return {"token_level_rewards": rewards, "response_mask": mask}


def _uid(*ids: object) -> np.ndarray:
    return np.array(ids, dtype=object)


def test_gae_by_hand() -> None:
    # d1 = 1 - 0.2 = 0.8; d0 = 0.9 * 0.2 - 0.5 = -0.32; A0 = -0.32 + 0.9 * 0.8 * 0.8 = 0.256
    advantages, returns = compute_gae_advantage_return(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.2]]), torch.ones(1, 2), gamma=0.9, lam=0.8
    )
    torch.testing.assert_close(returns, torch.tensor([[0.756, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-math.sqrt(0.5), math.sqrt(0.5)]]))


def test_gae_steps_over_tool_output() -> None:
    mask = torch.tensor([[1, 0, 0, 1]])
    advantages, returns = compute_gae_advantage_return(
        torch.tensor([[0.0, 7.0, 7.0, 1.0]]), torch.tensor([[0.5, 9.0, -9.0, 0.2]]), mask, gamma=0.9, lam=0.8
    )
    torch.testing.assert_close(returns[mask.bool()], torch.tensor([0.756, 1.0]))
    torch.testing.assert_close(advantages[mask.bool()], torch.tensor([-math.sqrt(0.5), math.sqrt(0.5)]))


def test_grpo_by_hand() -> None:
    batch = _outcome([1, 0, 0, 5], lengths=[1, 2, 1, 2])
    advantages, returns = compute_grpo_outcome_advantage(**batch, uid=_uid("a", "a", "a", "b"))
    first, rest = 2 / math.sqrt(3), -1 / math.sqrt(3)
    expected = torch.tensor([[first, 0.0], [rest, rest], [rest, 0.0], [5.0, 5.0]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    assert returns is advantages


def test_dr_grpo_is_grpo_without_the_spread() -> None:
    advantages, _ = compute_grpo_outcome_advantage(
        **_outcome([1, 0, 0]), uid=_uid(7, 7, 7), norm_adv_by_std_in_grpo=False
    )
    torch.testing.assert_close(advantages.flatten(), torch.tensor([2 / 3, -1 / 3, -1 / 3]))


def test_grpo_advantages_sum_to_zero_within_each_group() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, generator=generator).tolist()
    uid = torch.randint(0, 8, (64,), generator=generator)
    advantages, _ = compute_grpo_outcome_advantage(**_outcome(scores), uid=uid.numpy().astype(object))
    sums = torch.zeros(8).index_add_(0, uid, advantages.flatten())
    torch.testing.assert_close(sums, torch.zeros(8), atol=1e-5, rtol=0)


def test_passk_by_hand() -> None:
    batch, uid = _outcome([0.0, 1.0, 0.5, 2.0, 2.0]), _uid("x", "x", "x", "y", "y")
    plain, _ = compute_grpo_passk_outcome_advantage(**batch, uid=uid, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(plain.flatten(), torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0]))
    scaled, _ = compute_grpo_passk_outcome_advantage(**batch, uid=uid)  # the spread of (0, 1, 0.5) is 0.5
    torch.testing.assert_close(scaled.flatten(), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0)


def test_passk_refuses_a_group_of_one() -> None:
    with pytest.raises(ValueError, match="row 2 is alone"):
        compute_grpo_passk_outcome_advantage(**_outcome([1, 0, 1]), uid=_uid(0, 0, 1))


def test_rloo_by_hand() -> None:
    advantages, _ = compute_rloo_outcome_advantage(**_outcome([1, 0, 0, 4]), uid=_uid(0, 0, 0, 1))
    torch.testing.assert_close(advantages.flatten(), torch.tensor([1.0, -0.5, -0.5, 4.0]))


def test_opo_by_hand() -> None:
    advantages, _ = compute_opo_outcome_advantage(**_outcome([1, 0, 3], lengths=[1, 3, 1]), uid=_uid(0, 0, 1))
    expected = torch.tensor([[0.75, 0, 0], [-0.25, -0.25, -0.25], [3.0, 0, 0]])
    torch.testing.assert_close(advantages, expected)


def test_gpg_by_hand() -> None:
    # Two of four rows score: alpha = 2; centred rewards are +-0.5. Minus zero is zero.
    advantages, _ = compute_gpg_outcome_advantage(**_outcome([1, -0.0, 0, 1]), uid=_uid(0, 0, 1, 1), f_norm=0.5)
    torch.testing.assert_close(advantages.flatten(), torch.tensor([2.0, -2.0, -2.0, 2.0]))


def test_reinforce_plus_plus_by_hand() -> None:
    rewards, mask = torch.tensor([[0.0, 3.0, 0.0, 1.0, 3.0]]), torch.tensor([[1, 0, 1, 1, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.25, 0.0, 0.5, 1.0, 0.0]]))
    kept = torch.tensor([0.25, 0.5, 1.0])
    torch.testing.assert_close(advantages[mask.bool()], (kept - kept.mean()) / kept.std())
    assert (advantages[~mask.bool()] == 0).all()


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(**_outcome([1, 0]), uid=_uid(0, 0))
    torch.testing.assert_close(advantages.flatten(), torch.tensor([math.sqrt(0.5), -math.sqrt(0.5)]))


def test_whitening_by_rows_equals_whitening_by_tokens() -> None:
    batch = _outcome([1.0, 0.25, -2.0, 0.5, 3.0], lengths=[3, 1, 7, 0, 4])
    uid = _uid(0, 0, 0, 1, 1)
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(**batch, uid=uid)
    centered, _ = compute_grpo_outcome_advantage(**batch, uid=uid, norm_adv_by_std_in_grpo=False)
    expected = masked_whiten(centered, batch["response_mask"]) * batch["response_mask"]
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=1e-6)


def test_whitening_many_equal_returns_leaves_no_rounding_error() -> None:
    # The float32 mean of these is off by 1e-7, which a division by sqrt(1e-8) would make 1e-3.
    advantages, _ = compute_reinforce_plus_plus_outcome_advantage(
        torch.nn.functional.pad(torch.full((512, 1), 0.7), (4095, 0)), torch.ones(512, 4096)
    )
    assert advantages.abs().max() < 1e-6


def test_max_rl_by_hand() -> None:
    batch = _outcome([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.5])
    advantages, _ = compute_max_rl_outcome_advantage(**batch, uid=_uid(0, 0, 0, 0, 1, 1, 2, 2, 3))
    assert advantages.flatten().tolist() == pytest.approx([3, -1, -1, -1, 0, 0, -1 / 3, 1 / 3, 0.5])


def test_max_rl_is_the_gradient_of_the_truncated_log_likelihood() -> None:
    """log p = -sum_k (1 - p)^k / k; a group of n follows the gradient of its first n - 1 terms. Here n = 3.

    All 8 groups of a coin whose right side has probability p = sigmoid(t); grad(log p) of right 1 - p, of wrong -p.
    """
    p, mean = 0.3, 0.0
    for outcomes in itertools.product([0.0, 1.0], repeat=3):
        chance = math.prod(p if right else 1 - p for right in outcomes)
        rows, _ = compute_max_rl_outcome_advantage(**_outcome(list(outcomes)), uid=_uid(0, 0, 0))
        scores = [1 - p if right else -p for right in outcomes]
        mean += chance * sum(a * s for a, s in zip(rows.flatten().tolist(), scores, strict=True)) / 3
    assert mean == pytest.approx((1 + (1 - p)) * p * (1 - p))


def test_max_rl_refuses_negative_scores() -> None:
    with pytest.raises(ValueError, match=r"row 1 scored -1; it divides by the mean.*Return 0 for a wrong response"):
        compute_max_rl_outcome_advantage(**_outcome([1.0, -1.0]), uid=_uid(0, 0))


def test_remax_by_hand() -> None:
    advantages, returns = compute_remax_outcome_advantage(
        torch.tensor([[0.5, 1.0, 9.0]]), torch.tensor([0.25]), torch.tensor([[1, 1, 0]])
    )
    torch.testing.assert_close(returns, torch.tensor([[1.5, 1.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[1.25, 0.75, 0.0]]))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    """0.1 has no exact float: a mean off by one rounding step, divided by a spread of 1e-9, would be a large number."""
    batch = _outcome([0.1] * 6, lengths=[1, 2, 3, 1, 2, 3])
    advantages, _ = get_adv_estimator_fn(name)(**batch, uid=_uid(0, 0, 0, 0, 0, 0))
    assert advantages.abs().max() <= (1e-7 if name == "opo" else 0.0)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_order_of_rows_and_kind_of_ids_do_not_matter(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    batch = _outcome(torch.rand(8, generator=generator).tolist(), lengths=[3, 1, 2, 5, 4, 2, 2, 1])
    estimator = get_adv_estimator_fn(name)
    expected, _ = estimator(**batch, uid=_uid(0, 0, 0, 1, 1, 2, 2, 2))
    mixed_ids = ["x", "x", "x", 7, 7, ("t", 1), ("t", 1), ("t", 1)]
    torch.testing.assert_close(estimator(**batch, uid=mixed_ids)[0], expected)
    torch.testing.assert_close(estimator(**batch, uid=torch.tensor([9, 9, 9, 4, 4, 0, 0, 0]))[0], expected)
    order = torch.tensor([5, 0, 3, 7, 1, 4, 2, 6])
    shuffled = {key: column[order] for key, column in batch.items()}
    actual, _ = estimator(**shuffled, uid=_uid(2, 0, 1, 2, 0, 1, 0, 2))
    torch.testing.assert_close(actual, expected[order])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_the_type_of_the_mask_does_not_matter(name: str, dtype: torch.dtype) -> None:
    batch = _outcome([1.0, 0.0, 0.5, 2.0], lengths=[3, 1, 2, 4])
    uid = _uid(0, 0, 1, 1)
    expected, _ = get_adv_estimator_fn(name)(**batch, uid=uid)
    batch["response_mask"] = batch["response_mask"].to(dtype)
    actual, _ = get_adv_estimator_fn(name)(**batch, uid=uid)
    torch.testing.assert_close(actual, expected)
    assert actual.dtype == torch.float32


@pytest.mark.parametrize("name", adv_estimator_names())
def test_empty_response_masks_stay_finite_and_zero(name: str) -> None:
    columns = {
        "token_level_rewards": torch.zeros(4, 3),
        "response_mask": torch.zeros(4, 3),
        "uid": _uid(0, 0, 1, 1),
        "values": torch.ones(4, 3),
        "reward_baselines": torch.ones(4),
        "old_log_probs": -torch.ones(4, 3),
        "sum_pi_squared": torch.ones(4, 3),
    }
    advantages, returns = get_adv_estimator_fn(name)(**columns)
    assert torch.isfinite(advantages).all()
    assert torch.isfinite(returns).all()
    assert (advantages * columns["response_mask"] == 0).all()


@pytest.mark.parametrize("name", adv_estimator_names())
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused_by_row(name: str, bad: float) -> None:
    batch = _outcome([1.0, 0.0, bad, 1.0])
    with pytest.raises(ValueError, match="row 2 is not finite"):
        get_adv_estimator_fn(name)(
            **batch, uid=_uid(0, 0, 1, 1), values=torch.zeros(4, 1), reward_baselines=torch.zeros(4),
            old_log_probs=torch.zeros(4, 1), sum_pi_squared=torch.zeros(4, 1),
        )  # fmt: skip


@pytest.mark.parametrize("name", adv_estimator_names())
def test_bfloat16_rewards_are_computed_in_float32_and_inputs_are_left_alone(name: str) -> None:
    batch = _outcome([1.0, 0.0, 0.5, 0.25], lengths=[2, 1, 3, 1])
    batch["token_level_rewards"] = batch["token_level_rewards"].bfloat16()
    before = {key: column.clone() for key, column in batch.items()}
    columns = {
        "uid": _uid(0, 0, 1, 1), "values": torch.zeros(4, 3), "reward_baselines": torch.zeros(4),
        "old_log_probs": torch.zeros(4, 3), "sum_pi_squared": torch.zeros(4, 3),
    }  # fmt: skip
    advantages, returns = get_adv_estimator_fn(name)(**batch, **columns)
    assert advantages.dtype == returns.dtype == torch.float32
    for key, column in before.items():
        assert torch.equal(batch[key], column)


def test_one_id_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ids for 4 rows"):
        compute_grpo_outcome_advantage(**_outcome([1, 0, 1, 0]), uid=_uid(0, 0, 1))
