"""DPPO (https://arxiv.org/abs/2602.04879): a trust region in divergence instead of PPO's clip of the ratio.

A token teaches nothing once the policy has moved too far in the direction of its advantage. The distance is that of two
coins, "this token" or "any other": total variation (`dppo_tv`) or KL (`dppo_kl`). So rare tokens, whose ratio is large
at once, may still learn.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, masked_log_prob, register_token_loss

_SMALLEST = 1e-8  # keeps the log of "any other token" finite


@register_token_loss("dppo_tv")
def compute_policy_loss_dppo_tv(tokens: Tokens, *, low: float, high: float, clip_ratio_c: float = 20.0) -> TokenLosses:
    """-stop_gradient(min(r, c)) A log p while p - p_old <= high (A > 0), or >= -low (A <= 0); 0 beyond."""
    with torch.no_grad():
        change = tokens.kept_log_prob.exp() - masked_log_prob(tokens.old_log_prob, tokens.response_mask).exp()
        trusted = torch.where(tokens.advantages > 0, change <= high, change >= -low)
    return _truncated_reinforce(tokens, trusted, clip_ratio_c)


@register_token_loss("dppo_kl")
def compute_policy_loss_dppo_kl(tokens: Tokens, *, low: float, high: float, clip_ratio_c: float = 20.0) -> TokenLosses:
    """The same with KL(old coin, new coin) <= high or low, asked only when p moved where the advantage pulls."""
    with torch.no_grad():
        new_log, old_log = tokens.kept_log_prob, masked_log_prob(tokens.old_log_prob, tokens.response_mask)
        new, old = new_log.exp(), old_log.exp()
        other = ((1 - old + _SMALLEST) / (1 - new + _SMALLEST)).log()
        divergence = old * (old_log - new_log) + (1 - old) * other
        gains = (divergence <= high) | (new <= old)
        loses = (divergence <= low) | (new >= old)
        trusted = torch.where(tokens.advantages > 0, gains, loses)
    return _truncated_reinforce(tokens, trusted, clip_ratio_c)


def _truncated_reinforce(tokens: Tokens, trusted: torch.Tensor, largest_ratio: float) -> TokenLosses:
    with torch.no_grad():
        log_ratio = tokens.log_ratio(limited=True)
        ratio = log_ratio.exp()
        weight = ratio.clamp(max=largest_ratio) * trusted
    return -tokens.advantages * weight * tokens.kept_log_prob, {
        "actor/pg_clipfrac": ~trusted,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": (ratio > largest_ratio) & trusted,
    }
