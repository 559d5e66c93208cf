"""REINFORCE++ with the group mean as baseline (https://arxiv.org/abs/2501.03262), whitened over the batch."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
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
    # All tokens of a row are equal, so moments over tokens are moments over rows weighted by length.
    lengths = response_mask.sum(dim=-1).double()
    num_tokens = lengths.sum()
    mean = (lengths * centered).sum() / num_tokens.clamp(min=1)
    variance = (lengths * (centered - mean).square()).sum() / (num_tokens - 1).clamp(min=1)
    whitened = (centered - mean) * torch.rsqrt(variance + 1e-8)
    advantages = spread_over_tokens(whitened.to(scores.dtype), response_mask)
    return advantages, advantages
