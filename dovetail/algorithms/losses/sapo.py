"""SAPO (https://arxiv.org/abs/2511.20347): a smooth gate in place of PPO's hard clip.

The method is defined with a mean over tokens, then over sequences, so `loss_agg_mode` is ignored.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("sapo", fixed_agg_mode="seq-mean-token-mean")
def compute_policy_loss_sapo(tokens: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLosses:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: negative tokens cool down faster."""
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos={tau_pos} and tau_neg={tau_neg} must be positive: they are gate temperatures.")
    log_ratio = tokens.log_ratio(limited=True)
    ratio = log_ratio.exp()
    tau = torch.where(tokens.advantages > 0, torch.full_like(ratio, tau_pos), tau_neg)
    losses = -tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    never = torch.zeros_like(ratio)
    return losses, {"actor/pg_clipfrac": never, "actor/ppo_kl": -log_ratio, "actor/pg_clipfrac_lower": never}
