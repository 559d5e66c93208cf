"""One advantage per token, from the rewards still to come: GAE, REINFORCE++ and ReMax."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import check_finite_rows
from dovetail.algorithms.masked import at_least_float32, masked_whiten
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (https://arxiv.org/abs/1506.02438): A_t = d_t + gamma lam A_next, d_t = r_t + gamma V_next - V_t;
    returns = A + V, then A is whitened.

    "Next" is the next token the mask keeps: tool output inside a response (a hole in the mask) is stepped over, and
    holds the advantage of the token after it until the loss masks it out.
    """
    check_finite_rows(token_level_rewards.sum(dim=-1))
    values = at_least_float32(values)
    # Time first: a step of the recursion then reads contiguous memory instead of one element per row.
    step_values = values.t().contiguous()
    surprise = (token_level_rewards - values).t().contiguous()
    kept = response_mask.bool().t().contiguous()
    advantages = torch.empty_like(surprise)
    next_value = torch.zeros_like(surprise[0]) if len(surprise) else surprise.sum(dim=0)
    next_advantage = next_value
    for t in reversed(range(len(surprise))):
        delta = surprise[t].add(next_value, alpha=gamma)
        next_advantage = torch.where(kept[t], delta.add_(next_advantage, alpha=gamma * lam), next_advantage)
        next_value = torch.where(kept[t], step_values[t], next_value)
        advantages[t] = next_advantage
    advantages = advantages.t().contiguous()
    return masked_whiten(advantages, response_mask), advantages + values


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float = 1.0,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): G_t = r_t + gamma G_next over kept tokens (holes are stepped over
    without discount), 0 elsewhere; whitened over the batch.
    """
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


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax (https://arxiv.org/abs/2310.10505): A_t = (reward still to come from kept tokens) - (score of the greedy
    response). `reward_baselines`: one per row.
    """
    check_finite_rows(token_level_rewards.sum(dim=-1) + reward_baselines)
    kept_rewards = at_least_float32(token_level_rewards) * response_mask
    returns = kept_rewards.flip(-1).cumsum(dim=-1).flip(-1)
    return returns - reward_baselines.unsqueeze(-1) * response_mask, returns
