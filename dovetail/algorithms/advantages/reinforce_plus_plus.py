"""REINFORCE++ (https://arxiv.org/abs/2501.03262): discounted returns, whitened over the batch."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import check_finite_rows
from dovetail.algorithms.masked import at_least_float32, masked_whiten
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float = 1.0,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """G_t = r_t + gamma G_next over kept tokens (holes are stepped over without discount), 0 elsewhere."""
    check_finite_rows(token_level_rewards.sum(dim=-1))
    rewards = at_least_float32(token_level_rewards).t().contiguous()
    kept = response_mask.bool().t().contiguous()
    returns = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[0]) if len(rewards) else rewards.sum(dim=0)
    for t in reversed(range(len(rewards))):
        running = torch.where(kept[t], rewards[t].add(running, alpha=gamma), running)
        returns[t] = running
    returns = torch.where(kept, returns, 0.0).t().contiguous()
    return masked_whiten(returns, response_mask) * response_mask, returns
