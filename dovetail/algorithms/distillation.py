"""On-policy distillation: the reverse KL from a teacher on tokens that the student sampled. Tensors in, tensors out.

The gradient of KL(student, teacher) at one position is the expectation, over tokens of the student, of
grad log p_student x (log p_student - log p_teacher). So minus that difference is an advantage, and the policy-gradient
update is an unbiased estimate (`sampled`). With the teacher's k most likely tokens the divergence itself, not an
estimate, is a loss with less variance (`top_k`); so it is over the whole vocabulary (`full`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from dovetail.algorithms.masked import at_least_float32

Divergence = Literal["reverse", "forward", "jsd"]

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


def listed_reverse_kl(log_prob: torch.Tensor, teacher_log_prob: torch.Tensor) -> torch.Tensor:
    """KL(student, teacher) over `[..., k]` listed tokens and one event for all others; at most the full divergence.

    Both give the log-probs of the same tokens. With all tokens of the vocabulary listed it is the full divergence.
    """
    log_prob, teacher_log_prob = at_least_float32(log_prob), at_least_float32(teacher_log_prob)
    prob = log_prob.exp()
    rest = (1.0 - prob.sum(-1)).clamp(min=_SMALLEST)
    teacher_rest = (1.0 - teacher_log_prob.exp().sum(-1)).clamp(min=_SMALLEST)
    return (prob * (log_prob - teacher_log_prob)).sum(-1) + rest * (rest / teacher_rest).log()


def vocabulary_divergence(log_prob: torch.Tensor, teacher_log_prob: torch.Tensor, kind: Divergence) -> torch.Tensor:
    """Between two distributions over `[..., V]`. reverse: KL(student, teacher); forward: KL(teacher, student); jsd: the
    mean of the KLs of both from their middle."""
    if kind == "reverse":
        return _kl(log_prob, teacher_log_prob)
    if kind == "forward":
        return _kl(teacher_log_prob, log_prob)
    middle = torch.logaddexp(log_prob, teacher_log_prob) - math.log(2)
    return 0.5 * (_kl(log_prob, middle) + _kl(teacher_log_prob, middle))


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
