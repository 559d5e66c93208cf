"""REINFORCE with the drift from the old policy reported: -A log p.

With `old_log_prob` = the engine's log-probs and `rollout_is_weights` = policy / engine, this is REINFORCE with
truncated importance sampling and no separate old-policy pass.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, token_share
from dovetail.algorithms.losses.ratio import masked_log_prob, masked_log_ratio, weighted_agg_loss
from dovetail.algorithms.registry import register_policy_loss


@register_policy_loss("reinforce")
def compute_policy_loss_reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    loss_agg_mode: str = "seq-mean-token-sum",
    counts: BatchCounts | None = None,
    loss_scale_factor: float | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **_other_losses: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A log p, weighted by `rollout_is_weights` when given."""
    losses = -advantages * masked_log_prob(log_prob, response_mask)
    loss = weighted_agg_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, counts, loss_scale_factor)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask).detach()
    return loss, {"actor/ppo_kl": token_share(-log_ratio, response_mask, counts)}
