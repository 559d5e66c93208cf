"""On-policy RL with optimal baseline (OPO, https://arxiv.org/abs/2505.23585): a length-weighted group mean."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = R - sum(length R) / sum(length) over the group; a group of one keeps its score."""
    scores = outcome_scores(token_level_rewards)
    groups = Groups(uid, scores)
    lengths = response_mask.sum(dim=-1)
    # A group whose answers are all masked out has no length; its tokens carry no advantage either way.
    baseline = (groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1.0)).to(scores.dtype)
    row_advantages = scores - torch.where(groups.row_size > 1, baseline[groups.number], 0.0)
    advantages = spread_over_tokens(row_advantages, response_mask)
    return advantages, advantages
