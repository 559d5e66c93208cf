"""DPPO (https://arxiv.org/abs/2602.04879): a trust region in divergence instead of PPO's clip of the ratio.

A token teaches nothing once the policy has moved too far in the direction of its advantage. The distance is that of two
coins, "this token" or "any other": total variation (`dppo_tv`) or KL (`dppo_kl`). So rare tokens, whose ratio is large
at once, may still learn.
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

_SMALLEST = 1e-8  # keeps the log of "any other token" finite


@register_token_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> TokenLosses:
    """-stop_gradient(min(r, c)) A log p while p - p_old <= high (A > 0), or >= -low (A <= 0); 0 beyond."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    with torch.no_grad():
        change = masked_log_prob(log_prob, response_mask).exp() - masked_log_prob(old_log_prob, response_mask).exp()
        trusted = torch.where(advantages > 0, change <= high, change >= -low)
    return _truncated_reinforce(old_log_prob, log_prob, advantages, response_mask, trusted, clip_ratio_c)


@register_token_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> TokenLosses:
    """The same with KL(old coin, new coin) <= high or low, asked only when p moved where the advantage pulls."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    with torch.no_grad():
        new_log, old_log = masked_log_prob(log_prob, response_mask), masked_log_prob(old_log_prob, response_mask)
        new, old = new_log.exp(), old_log.exp()
        other = ((1 - old + _SMALLEST) / (1 - new + _SMALLEST)).log()
        divergence = old * (old_log - new_log) + (1 - old) * other
        gains = (divergence <= high) | (new <= old)
        loses = (divergence <= low) | (new >= old)
        trusted = torch.where(advantages > 0, gains, loses)
    return _truncated_reinforce(old_log_prob, log_prob, advantages, response_mask, trusted, clip_ratio_c)


def _truncated_reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    trusted: torch.Tensor,
    largest_ratio: float,
) -> TokenLosses:
    with torch.no_grad():
        log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(max=largest_ratio) * trusted
    return -advantages * weight * masked_log_prob(log_prob, response_mask), {
        "actor/pg_clipfrac": ~trusted,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": (ratio > largest_ratio) & trusted,
    }
