"""CISPO (https://arxiv.org/abs/2506.13585): REINFORCE weighted by a clipped ratio that carries no gradient.

A clipped token still learns, only with a bounded weight; PPO would drop it.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("cispo")
def compute_policy_loss_cispo(tokens: Tokens, *, low: float, high: float) -> TokenLosses:
    """-stop_gradient(clip(r, 1 - low, 1 + high)) A log p."""
    with torch.no_grad():
        log_ratio = tokens.log_ratio(limited=True)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - low, 1 + high)
    return -weight * tokens.advantages * tokens.kept_log_prob, {
        "actor/pg_clipfrac": ratio != weight,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(ratio),
    }
