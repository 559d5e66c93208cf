"""DRO (https://arxiv.org/abs/2405.19107): policy gradient with a quadratic pull towards the old policy, no clip."""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, token_share
from dovetail.algorithms.losses.ratio import masked_log_prob, masked_log_ratio, weighted_agg_loss
from dovetail.algorithms.registry import register_policy_loss


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    counts: BatchCounts | None = None,
    loss_scale_factor: float | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    dro_beta: float = 0.1,
    **_other_losses: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A log p + (beta / 2) (log p - log p_old)^2."""
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    losses = -advantages * masked_log_prob(log_prob, response_mask) + 0.5 * dro_beta * log_ratio.square()
    loss = weighted_agg_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, counts, loss_scale_factor)
    return loss, {"actor/ppo_kl": token_share(-log_ratio.detach(), response_mask, counts)}
