"""REINFORCE++ with the group mean as baseline (https://arxiv.org/abs/2501.03262), whitened over the batch."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.masked import masked_whiten
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = whiten(R - mean of group), mean and variance taken over all kept tokens of the batch."""
    scores = outcome_scores(token_level_rewards)
    centered = scores - Groups(uid, scores).row_mean(scores)
    spread = spread_over_tokens(centered, token_level_rewards, response_mask)
    advantages = masked_whiten(spread, response_mask) * response_mask
    return advantages, advantages
