"""SAPO (https://arxiv.org/abs/2511.20347): a smooth gate in place of PPO's hard clip.

The method is defined with a mean over tokens, then over sequences, so `loss_agg_mode` is ignored.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, agg_loss, token_share
from dovetail.algorithms.losses.ratio import MAX_LOG_RATIO, masked_log_ratio
from dovetail.algorithms.registry import register_policy_loss


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    counts: BatchCounts | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    **_other_losses: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: negative tokens cool down faster."""
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos={tau_pos} and tau_neg={tau_neg} must be positive: they are gate temperatures.")
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    positive = torch.full_like(ratio, tau_pos)
    tau = torch.where(advantages > 0, positive, tau_neg)
    losses = -advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)

    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, "seq-mean-token-mean", counts=counts)
    metrics = {
        "actor/pg_clipfrac": ratio.new_zeros(()),
        "actor/ppo_kl": token_share(-log_ratio.detach(), response_mask, counts),
        "actor/pg_clipfrac_lower": ratio.new_zeros(()),
    }
    return loss, metrics
