"""Group policy gradient (GPG, https://arxiv.org/abs/2504.02546): centred rewards, rescaled for answers that score 0."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    f_norm: float = 1.0,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = alpha (R - mean of group) / f_norm, alpha = rows / rows with a score other than 0."""
    scores = outcome_scores(token_level_rewards)
    alpha = scores.shape[0] / torch.count_nonzero(scores).clamp(min=1)
    row_advantages = alpha * (scores - Groups(uid, scores).row_mean(scores)) / f_norm
    advantages = spread_over_tokens(row_advantages, response_mask)
    return advantages, advantages
