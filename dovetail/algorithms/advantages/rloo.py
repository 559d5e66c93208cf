"""REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740): the mean of the other answers is the baseline."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("rloo", "rloo_vectorized")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = R - mean of the others = n / (n - 1) (R - mean of group); a group of one keeps its score."""
    scores = outcome_scores(token_level_rewards)
    groups = Groups(uid, scores)
    leave_one_out = groups.row_size / (groups.row_size - 1).clamp(min=1)
    row_advantages = (scores - groups.row_mean(scores)) * leave_one_out
    advantages = spread_over_tokens(row_advantages, response_mask)
    return advantages, advantages
