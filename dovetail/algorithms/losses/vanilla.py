"""PPO's clipped loss, with separate lower and upper range (clip-higher) and dual clip for negative advantages."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import (
    MAX_LOG_RATIO,
    TokenLosses,
    clip_range,
    masked_log_ratio,
    register_token_loss,
)


@register_token_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 never more than -A c (dual clip)."""
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} must exceed 1: it bounds the ratio of tokens that got worse.")
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    return losses, {
        "actor/pg_clipfrac": clipped > unclipped,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": (pessimistic > ceiling) & (advantages < 0),
    }
