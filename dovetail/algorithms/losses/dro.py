"""DRO (https://arxiv.org/abs/2405.19107): policy gradient with a quadratic pull towards the old policy, no clip."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, masked_log_prob, masked_log_ratio, register_token_loss


@register_token_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    dro_beta: float = 0.1,
) -> TokenLosses:
    """-A log p + (beta / 2) (log p - log p_old)^2."""
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    losses = -advantages * masked_log_prob(log_prob, response_mask) + 0.5 * dro_beta * log_ratio.square()
    return losses, {"actor/ppo_kl": -log_ratio}
