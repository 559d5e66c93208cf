"""Distillation signals against the divergence they stand for, on a vocabulary small enough to sum over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dovetail.algorithms import compute_policy_loss_vanilla
from dovetail.algorithms.distillation import (
    Divergence,
    clamp_signal,
    distillation_advantages,
    listed_divergence,
    vocabulary_divergence,
)
from dovetail.algorithms.kl import kl_penalty

pytestmark = pytest.mark.unit

VOCABULARY = 6


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_the_advantage_is_what_the_teacher_adds_to_the_log_prob() -> None:
    student, teacher = torch.tensor([[0.5, 0.25, 0.9]]).log(), torch.tensor([[0.25, 0.5, 0.1]]).log()
    found = distillation_advantages(student, teacher, torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(found, torch.tensor([[-math.log(2), math.log(2), 0.0]]))


def test_the_expected_gradient_of_sampled_tokens_is_that_of_the_reverse_kl() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    (expected,) = torch.autograd.grad(full_kl(student, teacher).sum(), student)
    # Every token once, weighted by how often the student samples it: the expectation, not a sample of it.
    total = torch.zeros_like(student)
    for token in range(VOCABULARY):
        log_prob = student.log_softmax(-1)[:, token : token + 1]
        judged = teacher.log_softmax(-1)[:, token : token + 1]
        mask = torch.ones(1, 1)
        loss, _ = compute_policy_loss_vanilla(
            old_log_prob=log_prob.detach(),
            log_prob=log_prob,
            advantages=distillation_advantages(log_prob, judged, mask),
            response_mask=mask,
        )
        (gradient,) = torch.autograd.grad(loss, student)
        total += log_prob.exp().item() * gradient
    torch.testing.assert_close(total, expected, atol=1e-12, rtol=1e-9)


def test_divergences_of_two_tokens_by_hand() -> None:
    student, teacher = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    by_hand = {
        "reverse": 0.5 * math.log(2) + 0.5 * math.log(2 / 3),
        "forward": 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2),
        # The middle is (0.375, 0.625).
        "jsd": 0.25 * (math.log(4 / 3) + math.log(4 / 5)) + 0.125 * math.log(2 / 3) + 0.375 * math.log(6 / 5),
    }
    for kind, expected in by_hand.items():
        assert vocabulary_divergence(student, teacher, kind).item() == pytest.approx(expected, rel=1e-5)  # type: ignore[arg-type]


def test_a_teacher_that_agrees_teaches_nothing() -> None:
    student = logits(2, rows=3).requires_grad_()
    log_prob = student.log_softmax(-1)
    assert not distillation_advantages(log_prob, log_prob, torch.ones(3, VOCABULARY)).any()
    kl = listed_divergence(log_prob[:, :2], log_prob[:, :2].detach())
    (gradient,) = torch.autograd.grad(kl.sum(), student)
    torch.testing.assert_close(kl, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


KINDS: tuple[Divergence, ...] = ("reverse", "forward", "jsd")


@pytest.mark.parametrize("clamp", [None, -2.0])
@pytest.mark.parametrize(("kind", "others"), [*((kind, "as_one") for kind in KINDS), ("forward", "ignored")])
def test_all_tokens_listed_give_the_full_divergence_and_its_gradient(
    kind: Divergence, others: Any, clamp: float | None
) -> None:
    student, teacher = logits(3, rows=4).requires_grad_(), logits(4, rows=4)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    found = listed_divergence(log_p, log_q, kind, others=others, log_prob_min=clamp)
    expected = vocabulary_divergence(log_p, log_q, kind, clamp)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    mine, right = (torch.autograd.grad(each.sum(), student, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(mine, right, atol=1e-6, rtol=0)
    assert mine.abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_give_a_lower_bound_that_grows_with_them(kind: Divergence) -> None:
    student, teacher = logits(5, rows=8), logits(6, rows=8)
    order = teacher.argsort(-1, descending=True)
    log_p, log_q = (values.log_softmax(-1).gather(-1, order) for values in (student, teacher))
    bounds = [listed_divergence(log_p[:, :k], log_q[:, :k], kind) for k in range(1, VOCABULARY)]
    for fewer, more in zip(bounds, [*bounds[1:], vocabulary_divergence(log_p, log_q, kind)], strict=True):
        assert (fewer <= more + 1e-9).all()


@pytest.mark.parametrize(
    ("kind", "others", "clamp", "expected"),
    [
        # One token of probability 1/2 against 1/4, the rest 1/2 against 3/4.
        ("reverse", "as_one", None, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ("forward", "as_one", None, 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
        # The middle is (3/8, 5/8).
        (
            "jsd",
            "as_one",
            None,
            0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5) + 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)),
        ),
        # The rest of both, and the student's token, count as e**-0.6; the teacher's rest is above that.
        ("forward", "as_one", -0.6, math.exp(-0.6) * 0.0 + 0.75 * (math.log(0.75) + 0.6)),
        # 1/4 x log(1/2) is below 0.
        ("forward", "ignored", None, 0.0),
    ],
)
def test_a_divergence_of_one_listed_token_by_hand(
    kind: Divergence, others: Any, clamp: float | None, expected: float
) -> None:
    half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    found = listed_divergence(half, quarter, kind, others=others, log_prob_min=clamp)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_without_the_other_tokens_the_forward_kl_pulls_towards_the_listed_ones_alone() -> None:
    """By hand: tokens of 1/8 and 1/4 against 1/2 and 1/4; over logits the gradient is mass of the teacher x p - q."""
    student = torch.tensor([1 / 8, 1 / 4, 5 / 8]).log().requires_grad_()
    listed = student.log_softmax(-1)[:2]
    found = listed_divergence(listed, torch.tensor([0.5, 0.25]).log(), "forward", others="ignored")
    assert found.item() == pytest.approx(0.5 * math.log(4))
    (gradient,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(gradient, 0.75 * torch.tensor([1 / 8, 1 / 4, 5 / 8]) - torch.tensor([0.5, 0.25, 0.0]))


def test_a_gradient_of_listed_tokens_is_that_of_finite_differences() -> None:
    student, teacher = logits(7).requires_grad_(), logits(8)[:, :3].log_softmax(-1) - 0.2
    for kind, others in [*((kind, "as_one") for kind in KINDS), ("forward", "ignored")]:
        assert torch.autograd.gradcheck(
            lambda x, kind=kind, others=others: listed_divergence(  # type: ignore[misc]
                x.log_softmax(-1)[:, :3], teacher, kind, others=others, log_prob_min=-3.0
            ),
            student,
        )


def test_a_signal_is_clamped_on_both_sides_and_has_no_gradient_there() -> None:
    values = torch.tensor([-7.0, -1.0, 2.0, 9.0], requires_grad=True)
    found = clamp_signal(values, 5.0)
    assert found.tolist() == [-5.0, -1.0, 2.0, 5.0]
    assert torch.autograd.grad(found.sum(), values)[0].tolist() == [0, 1, 1, 0]
    assert clamp_signal(values, None) is values


@pytest.mark.parametrize(("estimate", "kind"), [("k2", "reverse"), ("k3", "forward")])
def test_the_expected_gradient_of_an_estimate_is_that_of_a_divergence(estimate: str, kind: Divergence) -> None:
    student, teacher = logits(9).requires_grad_(), logits(10)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    (expected,) = torch.autograd.grad(vocabulary_divergence(log_p, log_q, kind).sum(), student, retain_graph=True)
    # Each token as often as the student samples it.
    (found,) = torch.autograd.grad((log_p.detach().exp() * kl_penalty(log_p, log_q, estimate)).sum(), student)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
