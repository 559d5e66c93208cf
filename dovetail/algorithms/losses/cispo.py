"""CISPO (https://arxiv.org/abs/2506.13585): REINFORCE weighted by a clipped ratio that carries no gradient.

A clipped token still learns, only with a bounded weight; PPO would drop it.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, token_share
from dovetail.algorithms.losses.ratio import (
    MAX_LOG_RATIO,
    clip_range,
    masked_log_prob,
    masked_log_ratio,
    weighted_agg_loss,
)
from dovetail.algorithms.registry import register_policy_loss


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    counts: BatchCounts | None = None,
    loss_scale_factor: float | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    **_other_losses: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-stop_gradient(clip(r, 1 - low, 1 + high)) A log p."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    with torch.no_grad():
        log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - low, 1 + high)
        metrics = {
            "actor/pg_clipfrac": token_share((ratio != weight).to(ratio.dtype), response_mask, counts),
            "actor/ppo_kl": token_share(-log_ratio, response_mask, counts),
            "actor/pg_clipfrac_lower": ratio.new_zeros(()),
        }
    losses = -weight * advantages * masked_log_prob(log_prob, response_mask)
    loss = weighted_agg_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, counts, loss_scale_factor)
    return loss, metrics
