"""Group-relative advantage (GRPO, https://arxiv.org/abs/2402.03300): the other answers to a prompt are its baseline.

Dr.GRPO (https://arxiv.org/abs/2503.20783) is this file with `norm_adv_by_std_in_grpo=False`, together with
`loss_agg_mode=seq-mean-token-sum-norm`.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("grpo", "grpo_vectorized")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = (R - mean of group) / (std of group + epsilon) on every token; a group of one keeps its score."""
    scores = outcome_scores(token_level_rewards)
    groups = Groups(uid, scores)
    centered = scores - groups.row_mean(scores)
    if norm_adv_by_std_in_grpo:
        centered = centered / (groups.row_std(scores) + epsilon)
    advantages = spread_over_tokens(centered, response_mask)
    return advantages, advantages
