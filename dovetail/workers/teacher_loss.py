"""What a teacher adds to the loss of an update, token by token. Knows no aggregation and no weight of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from dovetail.algorithms.distillation import clamp_signal, listed_divergence
from dovetail.algorithms.kl import kl_penalty
from dovetail.backends.base import TokenOutput
from dovetail.config.methods import DistillConfig
from dovetail.workers.response_columns import at_responses


class TeacherLoss(NamedTuple):
    """`[rows, response_len]`, of each token."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """By name; the divergence as it was before it was clamped."""


def teacher_loss(output: TokenOutput, columns: Mapping[str, Tensor], settings: DistillConfig) -> TeacherLoss | None:
    """From the tokens that the teacher lists, its whole distributions, or its log-probs of the sampled tokens.

    None where it is no loss: without a teacher's columns, or where the signal is in the advantages.
    """
    width, metrics = columns["responses"].size(1), dict[str, Tensor]()
    if output.listed is not None:
        listed, theirs = at_responses(output.listed, width), columns["teacher_top_log_probs"]
        divergence = listed_divergence(
            listed,
            theirs,
            settings.divergence,
            others=settings.other_tokens,
            log_prob_min=settings.log_prob_min_clamp,
        )
        metrics = {
            "distill/student_mass": listed.detach().exp().sum(-1),
            "distill/teacher_mass": theirs.exp().sum(-1),
            "distill/overlap_ratio": at_responses(output.overlap, width),
        }
    elif output.divergence is not None:
        divergence = at_responses(output.divergence, width)
    elif settings.is_estimate:
        divergence = kl_penalty(at_responses(output.log_probs, width), columns["ref_log_prob"], settings.kl)
    else:
        return None
    return TeacherLoss(
        clamp_signal(divergence, settings.loss_max_clamp), {"distill/kl": divergence.detach(), **metrics}
    )
