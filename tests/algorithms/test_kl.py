"""KL estimates, the penalty in rewards, and its controllers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dovetail.algorithms import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from dovetail.algorithms.kl import unbiased_kl

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Settings:
    type: str = "adaptive"
    kl_coef: float = 0.1
    horizon: float = 100
    target_kl: float = 0.5


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("kl", 0.5, 1.0),
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),
        ("k2", 0.125, 0.5),
        ("low_var_kl", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("mse+", 0.125, 0.5),
        ("low_var_kl+", math.exp(-0.5) - 0.5, 0.5),
        ("k3+", math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_kl_estimates_by_hand(name: str, value: float, gradient: float) -> None:
    logprob = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(logprob, torch.tensor([[-1.5]], dtype=torch.float64), name)
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(gradient)


def test_the_weighted_estimate_by_hand() -> None:
    """The policy is e^0.25 times the sampler and e^0.5 times the reference."""
    logprob = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    reference, sampler = torch.full((1, 1), -1.5).double(), torch.full((1, 1), -1.25).double()
    penalty = unbiased_kl(logprob, reference, sampler)
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(math.exp(0.25) * (math.exp(-0.5) - 0.5))
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(math.exp(0.25) * 0.5)


def test_only_the_weighted_estimate_has_the_mean_and_the_gradient_of_the_kl_when_another_policy_samples() -> None:
    """Exact expectations over a vocabulary of 7; the reference is far enough for the cap of `low_var_kl` to act."""
    generator = torch.Generator().manual_seed(0)
    policy, reference, sampler = (torch.randn(7, dtype=torch.float64, generator=generator) for _ in range(3))
    reference = (reference + torch.tensor([0, 0, 6.0, 0, 0, 0, 0])).log_softmax(-1)
    sampler = sampler.log_softmax(-1)

    def mean_and_gradient(estimate: Callable[[torch.Tensor], torch.Tensor], weights: torch.Tensor | None) -> list:
        logits = policy.clone().requires_grad_()
        log_probs = logits.log_softmax(-1)
        mean = ((log_probs.exp() if weights is None else weights) * estimate(log_probs)).sum()
        return [mean, *torch.autograd.grad(mean, logits)]

    exact = mean_and_gradient(lambda log_probs: log_probs - reference, None)
    weighted = mean_and_gradient(lambda log_probs: unbiased_kl(log_probs, reference, sampler), sampler.exp())
    torch.testing.assert_close(weighted, exact, rtol=1e-12, atol=1e-14)
    for name in ("k3", "k3+"):
        plain = mean_and_gradient(lambda log_probs, n=name: kl_penalty(log_probs, reference, n), sampler.exp())
        assert (plain[1] - exact[1]).abs().max() > 0.1, name


def test_the_exact_divergence_is_refused_with_an_alternative() -> None:
    with pytest.raises(ValueError, match="whole vocabulary; use 'low_var_kl'"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "full")


def test_an_unknown_estimate_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_equal_policies_have_no_divergence(name: str) -> None:
    logprob = -torch.rand(3, 4)
    assert (kl_penalty(logprob, logprob, name) == 0).all()


def test_low_variance_estimate_is_bounded() -> None:
    assert kl_penalty(torch.tensor([[-90.0]]), torch.tensor([[-1.0]]), "k3").item() == 10.0


def test_rewards_lose_the_penalty_on_kept_tokens_only() -> None:
    controller = FixedKLController(0.5)
    mask = torch.tensor([[1, 1], [1, 0]])
    rewards, metrics = apply_kl_penalty(
        token_level_scores=torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
        old_log_probs=torch.tensor([[-1.0, -1.0], [-1.0, math.nan]]),
        ref_log_prob=torch.tensor([[-1.2, -1.4], [-2.0, 5.0]]),
        response_mask=mask,
        kl_ctrl=controller,
    )
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.8], [1.5, 0.0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.3 + 1.0) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert controller.value == 0.5


@pytest.mark.parametrize(("rows", "factor"), [(2, 0.6), (5, 0.5), (500, 0.5)])
def test_one_step_of_many_rows_at_most_halves_the_coefficient(rows: int, factor: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=1)
    controller.update(current_kl=0.0, n_steps=rows)
    assert controller.value == pytest.approx(0.1 * factor)


def test_the_adaptive_controller_follows_each_batch_after_it_was_used() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=10)
    ones = torch.ones(2, 1)
    _, metrics = apply_kl_penalty(ones, ones, ones - 0.2, ones, controller)  # KL 0.2: far above target, error 20%
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_a_resumed_controller_continues() -> None:
    first = AdaptiveKLController(0.1, 0.1, 10)
    first.update(0.5, 4)
    second = AdaptiveKLController(0.1, 0.1, 10)
    second.load_state_dict(first.state_dict())
    first.update(0.01, 4)
    second.update(0.01, 4)
    assert first.value == second.value


def test_the_controller_is_chosen_by_type() -> None:
    assert isinstance(get_kl_controller(Settings()), AdaptiveKLController)
    fixed = get_kl_controller(Settings(type="fixed"))
    fixed.update(9.0, 1000)
    assert fixed.value == 0.1
    with pytest.raises(ValueError, match="'adaptve' is not known; use 'fixed' or 'adaptive'"):
        get_kl_controller(Settings(type="adaptve"))
    with pytest.raises(ValueError, match="horizon=0"):
        get_kl_controller(Settings(horizon=0))
