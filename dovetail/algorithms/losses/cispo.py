"""CISPO (https://arxiv.org/abs/2506.13585): REINFORCE weighted by a clipped ratio that carries no gradient.

A clipped token still learns, only with a bounded weight; PPO would drop it.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import (
    MAX_LOG_RATIO,
    TokenLosses,
    clip_range,
    masked_log_prob,
    masked_log_ratio,
    register_token_loss,
)


@register_token_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLosses:
    """-stop_gradient(clip(r, 1 - low, 1 + high)) A log p."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    with torch.no_grad():
        log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - low, 1 + high)
    losses = -weight * advantages * masked_log_prob(log_prob, response_mask)
    return losses, {
        "actor/pg_clipfrac": ratio != weight,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(ratio),
    }
