"""Offline losses: cases by hand, TRL's own numbers on the same tensors, and shares that add up over any cut."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.algorithms.offline import (
    OfflineLoss,
    dpo_loss,
    ipo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    preference_loss,
    preference_loss_names,
    reward_loss,
    reward_model_loss,
    simpo_loss,
)

pytestmark = pytest.mark.unit

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "preference_losses.json").read_text())[
    "cases"
]
SETTINGS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "simpo_gamma": 0.5,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}
E = 0.6931471805599453  # -log sigmoid(0)


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_dpo_by_hand() -> None:
    # Rewards 0.5 * (-2 - -4) = 1 and 0.5 * (-3 - -3) = 0; then 0 and 1.
    chosen, rejected = _numbers(-2, -5), _numbers(-3, -1)
    loss, metrics = dpo_loss(chosen, rejected, _numbers(-4, -5), _numbers(-3, -3), beta=0.5)
    right, wrong = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
    assert loss.item() == pytest.approx((right + wrong) / 2)
    assert metrics["rewards/accuracies"] == 0.5
    assert metrics["rewards/chosen"] == 0.5
    assert metrics["rewards/margins"] == 0.0
    assert metrics["logps/rejected"] == -2
    loss.backward()
    # d/dx -log sigmoid(m) = -sigmoid(-m) * beta
    torch.testing.assert_close(chosen.grad, _numbers(-0.25 / (1 + math.e), -0.25 / (1 + math.exp(-1))).detach())
    torch.testing.assert_close(rejected.grad, -chosen.grad)


def test_label_smoothing_mixes_the_loss_of_the_turned_pair() -> None:
    loss, _ = dpo_loss(_numbers(-1), _numbers(-3), _numbers(0), _numbers(0), beta=1.0, label_smoothing=0.25)
    right, wrong = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert loss.item() == pytest.approx(0.75 * right + 0.25 * wrong)


def test_ipo_by_hand() -> None:
    # Log-ratios 6 over 2 tokens and -4 over 4: a difference of 4, wanted 1 / (2 * 0.25) = 2.
    loss, metrics = ipo_loss(
        _numbers(-1), _numbers(-9), _numbers(-7), _numbers(-5), torch.tensor([2]), torch.tensor([4]), beta=0.25
    )
    assert loss.item() == 4.0
    assert metrics["rewards/margins"] == 2.5


def test_simpo_by_hand() -> None:
    loss, _ = simpo_loss(_numbers(-0.5), _numbers(-1.5), beta=2.0, gamma=2.0)
    assert loss.item() == pytest.approx(E)


def test_orpo_by_hand() -> None:
    # Probabilities 0.5 and 0.25 a token: odds 1 and 1/3, so log sigmoid(log 3) = log 0.75.
    chosen, rejected = _numbers(math.log(0.5)), _numbers(math.log(0.25))
    loss, metrics = orpo_loss(chosen, rejected, torch.tensor([3]), beta=0.5)
    assert loss.item() == pytest.approx(math.log(2) - 0.5 * math.log(0.75))
    assert metrics["nll_loss"].item() == pytest.approx(math.log(2))
    assert metrics["log_odds_chosen"].item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.69314, -0.6932, -50.0])
def test_orpo_has_a_finite_gradient_at_every_probability(log_prob: float) -> None:
    chosen = torch.tensor([log_prob], requires_grad=True)
    orpo_loss(chosen, torch.tensor([-1.0]), torch.tensor([1]), beta=0.1)[0].backward()
    assert chosen.grad is not None
    assert torch.isfinite(chosen.grad).all()


def test_kto_by_hand() -> None:
    # Log-ratios 2 and -1 against a baseline of 1: 1 - sigmoid(1) for the good one, 1 - sigmoid(2) for the bad one.
    good, bad = 1 / (1 + math.exp(1)), 1 / (1 + math.exp(2))
    loss, metrics = kto_loss(
        _numbers(-1, -4), _numbers(-3, -3), torch.tensor([True, False]), 1.0, beta=1.0, undesirable_weight=2.0
    )
    assert loss.item() == pytest.approx((good + 2 * bad) / 2)
    assert {name: float(value) for name, value in metrics.items()} == {
        "rewards/chosen": 2.0,
        "rewards/rejected": -1.0,
        "rewards/margins": 3.0,
        "logps/chosen": -1.0,
        "logps/rejected": -4.0,
        "kl": 1.0,
    }


def test_ktos_baseline_is_a_mean_without_gradient_and_never_below_0() -> None:
    mismatched = _numbers(-1, -4)
    baseline = kto_kl(mismatched, _numbers(-2, -1))
    assert baseline == -1.0
    assert not baseline.requires_grad
    rows = _numbers(-1), _numbers(-3), torch.tensor([True])
    assert kto_loss(*rows, baseline, beta=1.0)[0] == kto_loss(*rows, 0.0, beta=1.0)[0]


def test_reward_loss_by_hand() -> None:
    # Differences 2 and -1; a margin of 2 leaves 0 of the first. Sums 2 and 1.
    chosen, rejected = _numbers(2, 0), _numbers(0, 1)
    loss, metrics = reward_loss(chosen, rejected, torch.tensor([2.0, 0.0]), center_coefficient=0.1)
    assert loss.item() == pytest.approx((E + math.log(1 + math.e)) / 2 + 0.1 * (4 + 1) / 2)
    assert (metrics["accuracy"], metrics["margin"], metrics["mean_reward"]) == (0.5, 0.5, 0.75)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['loss_type']}-{case['settings']}")
def test_loss_gradient_and_metrics_are_trls_to_1e_5(case: dict[str, Any]) -> None:
    inputs = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    name = "scores" if case["loss_type"] == "reward" else "log_probs"
    output = inputs.pop(name).requires_grad_()
    loss = _loss(case["loss_type"], case["settings"])
    totals = _totals(loss, inputs)
    value, metrics = loss.share(output, inputs, totals)
    value.backward()
    assert value.item() == pytest.approx(case["loss"], abs=1e-5)
    assert output.grad is not None
    torch.testing.assert_close(output.grad, torch.tensor(case["grad"]), atol=1e-5, rtol=0)
    assert set(case["metrics"]) - {"kl"} <= set(metrics)
    for metric, expected in case["metrics"].items():
        assert float(metrics[metric]) == pytest.approx(expected, abs=1e-5), metric


def test_there_are_golden_cases_of_every_loss() -> None:
    assert {case["loss_type"] for case in CASES} == {*preference_loss_names(), "reward"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['loss_type']}-{case['settings']}")
def test_shares_of_micro_batches_add_up_to_the_whole(case: dict[str, Any]) -> None:
    inputs = {name: torch.tensor(value).double() for name, value in case["inputs"].items()}
    output = inputs.pop("scores" if case["loss_type"] == "reward" else "log_probs").requires_grad_()
    loss = _loss(case["loss_type"], case["settings"])
    totals = _totals(loss, inputs)
    whole, whole_metrics = loss.share(output, inputs, totals)
    parts = [
        loss.share(output[rows], {name: column[rows] for name, column in inputs.items()}, totals)
        for rows in (slice(0, 2), slice(2, 8))
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), whole)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), value)


def test_tokens_outside_the_mask_do_not_matter() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    rows = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -3.0, float("nan")]], requires_grad=True)
    columns = {"loss_mask": mask, "ref_log_prob_sum": torch.tensor([-2.0, -2.0])}
    loss, metrics = preference_loss("sigmoid", **SETTINGS).share(rows, columns, {"pairs": 1.0})
    loss.backward()
    assert metrics["logps/chosen"] == -3
    assert rows.grad is not None
    assert (rows.grad[mask == 0] == 0).all()


def test_an_unknown_loss_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'simp0'.*Did you mean simpo.*sigmoid, ipo, kto, orpo, simpo"):
        preference_loss("simp0", **SETTINGS)


def test_only_losses_with_a_log_ratio_need_a_reference() -> None:
    needed = {name: preference_loss(name, **SETTINGS).needs_reference for name in preference_loss_names()}
    assert needed == {"sigmoid": True, "ipo": True, "kto": True, "orpo": False, "simpo": False}


def _loss(loss_type: str, settings: dict[str, Any]) -> OfflineLoss:
    return reward_model_loss(**settings) if loss_type == "reward" else preference_loss(loss_type, **SETTINGS | settings)


def _totals(loss: OfflineLoss, columns: dict[str, Tensor]) -> dict[str, float]:
    if loss.baseline is None:
        return loss.count(columns)
    kl = {name.removeprefix("kl_"): columns.pop(name) for name in list(columns) if name.startswith("kl_")}
    # Rows of the batch alternate: one that is trained, one of the baseline.
    doubled = {"desirable": columns["desirable"].repeat_interleave(2)}
    return loss.count(doubled) | loss.baseline(kl.pop("log_probs"), kl)
