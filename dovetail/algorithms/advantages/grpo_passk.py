"""Pass@k advantage (https://arxiv.org/abs/2503.19595): only the best answer of a group learns, by its lead."""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.registry import register_adv_est


@register_adv_est("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = (best - second best) / (std of group + epsilon) for the best row, 0 for the others."""
    scores = outcome_scores(token_level_rewards)
    groups = Groups(uid, scores)
    if (groups.size < 2).any():
        row = int(torch.nonzero(groups.row_size < 2)[0])
        raise ValueError(
            f"grpo_passk: row {row} is alone in its group; pass@k needs rollout.n >= 2 answers per prompt."
        )
    ranked = groups.rank(scores)
    first = torch.cumsum(groups.size, dim=0) - groups.size
    best = ranked[first]
    lead = scores[best] - scores[ranked[first + 1]]
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.row_std(scores)[best] + epsilon)
    row_advantages = torch.zeros_like(scores).index_copy_(0, best, lead)
    advantages = spread_over_tokens(row_advantages, response_mask)
    return advantages, advantages
