"""ReMax (https://arxiv.org/abs/2310.10505): the reward of the greedy answer is the baseline."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import check_finite_rows
from dovetail.algorithms.masked import at_least_float32
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t = (reward still to come from kept tokens) - (score of the greedy answer). `reward_baselines`: one per row."""
    check_finite_rows(token_level_rewards.sum(dim=-1) + reward_baselines)
    kept_rewards = at_least_float32(token_level_rewards) * response_mask
    returns = kept_rewards.flip(-1).cumsum(dim=-1).flip(-1)
    return returns - reward_baselines.unsqueeze(-1) * response_mask, returns
