"""PPO's clipped loss, with separate lower and upper range (clip-higher) and dual clip for negative advantages."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("vanilla")
def compute_policy_loss_vanilla(tokens: Tokens, *, low: float, high: float, clip_ratio_c: float = 3.0) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 never more than -A c (dual clip)."""
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} must exceed 1: it bounds the ratio of tokens that got worse.")
    log_ratio, advantages = tokens.log_ratio(limited=True), tokens.advantages
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
