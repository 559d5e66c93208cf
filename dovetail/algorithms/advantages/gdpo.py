"""GDPO (https://arxiv.org/abs/2601.05242): each reward is normalised within its group before rewards are added.

One loud reward then does not drown the quiet ones. The sum is whitened over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.algorithms.groups import GroupIds, Groups, check_finite_rows, outcome_scores, spread_over_tokens
from dovetail.algorithms.masked import masked_whiten
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    reward_components: torch.Tensor | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = whiten(sum over k of w_k (R_k - mean of group) / (std of group + epsilon)).

    `reward_components` is `[rows, k]`, one number a row for each reward; without it the only reward is the sum of
    `token_level_rewards`. Weights are 1 unless given.
    """
    components = outcome_scores(token_level_rewards)[:, None] if reward_components is None else reward_components
    weights = [1.0] * components.shape[1] if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != components.shape[1]:
        raise ValueError(
            f"gdpo_reward_weights has {len(weights)} numbers for {components.shape[1]} rewards; give one for each."
        )
    groups = Groups(uid, components[:, 0])
    total = torch.zeros(components.shape[0], dtype=torch.float32, device=components.device)
    for weight, scores in zip(weights, components.float().unbind(dim=1), strict=True):
        check_finite_rows(scores)
        centered = scores - groups.row_mean(scores)
        if norm_adv_by_std_in_grpo:
            centered = centered / (groups.row_std(scores) + epsilon)
        total = total + weight * centered
    advantages = masked_whiten(spread_over_tokens(total, response_mask), response_mask) * response_mask
    return advantages, advantages
