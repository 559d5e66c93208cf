"""On-policy distillation: how far a student is from its teacher where it sampled. Tensors in, tensors out.

The gradient of KL(student, teacher) at one position is the expectation, over tokens of the student, of
grad log p_student x (log p_student - log p_teacher). So minus that difference is an advantage, and the policy-gradient
update is an unbiased estimate (`sampled`). With the teacher's k most likely tokens a divergence itself, not an
estimate, is a loss with less variance (`top_k`); so it is over the whole vocabulary (`full`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from dovetail.algorithms.masked import at_least_float32

Divergence = Literal["reverse", "forward", "jsd"]
OtherTokens = Literal["as_one", "ignored"]

_SMALLEST = 1e-8
"""Below it, what is left of a distribution beside its listed tokens is rounding."""


@torch.no_grad()
def distillation_advantages(
    log_prob: torch.Tensor, teacher_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """log p_teacher - log p_student of each sampled token; 0 on tokens that the mask leaves out.

    Each token is judged by itself: later tokens depend on it, but the divergence at their positions is theirs.
    """
    difference = at_least_float32(teacher_log_prob) - at_least_float32(log_prob)
    return torch.where(response_mask.bool(), difference, 0.0)


def listed_divergence(
    log_prob: torch.Tensor,
    teacher_log_prob: torch.Tensor,
    kind: Divergence = "reverse",
    *,
    others: OtherTokens = "as_one",
    log_prob_min: float | None = None,
) -> torch.Tensor:
    """The divergence over `[..., k]` listed tokens; both give the log-probs of the same tokens.

    `as_one`: all others are one more event, so that it is at most the full divergence. `ignored`: they do not count;
    what is summed up are no distributions, and may be negative, which is cut off. With all tokens of the vocabulary
    listed both are the full divergence.
    """
    log_prob, teacher_log_prob = at_least_float32(log_prob), at_least_float32(teacher_log_prob)
    if others == "ignored":
        return vocabulary_divergence(log_prob, teacher_log_prob, kind, log_prob_min).clamp(min=0.0)
    return vocabulary_divergence(_with_others(log_prob), _with_others(teacher_log_prob), kind, log_prob_min)


def _with_others(log_prob: torch.Tensor) -> torch.Tensor:
    """`[..., k + 1]`: the last is that of all tokens that are not listed."""
    rest = (1.0 - log_prob.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST)
    return torch.cat([log_prob, rest.log()], dim=-1)


def vocabulary_divergence(
    log_prob: torch.Tensor, teacher_log_prob: torch.Tensor, kind: Divergence, log_prob_min: float | None = None
) -> torch.Tensor:
    """Between two distributions over `[..., V]`. reverse: KL(student, teacher); forward: KL(teacher, student); jsd: the
    mean of the KLs of both from their middle. Log-probs below `log_prob_min` count as it."""
    if log_prob_min is not None:
        log_prob, teacher_log_prob = log_prob.clamp(min=log_prob_min), teacher_log_prob.clamp(min=log_prob_min)
    if kind == "reverse":
        return _kl(log_prob, teacher_log_prob)
    if kind == "forward":
        return _kl(teacher_log_prob, log_prob)
    middle = torch.logaddexp(log_prob, teacher_log_prob) - math.log(2)
    return 0.5 * (_kl(log_prob, middle) + _kl(teacher_log_prob, middle))


def clamp_signal(values: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Into `[-bound, bound]`: what one token adds to the loss, or its advantage."""
    return values if bound is None else values.clamp(-bound, bound)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
