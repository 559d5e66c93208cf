"""Clip-Cov (https://arxiv.org/abs/2505.22617): PPO's clip, and a few random high-covariance tokens get no gradient."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.covariance import token_covariance
from dovetail.algorithms.losses.ratio import (
    MAX_LOG_RATIO,
    TokenLosses,
    Tokens,
    clip_range,
    masked_log_ratio,
    register_token_loss,
)


@torch.no_grad()
def select_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int | None = None,
    **_other_losses: object,
) -> torch.Tensor:
    """True for `clip_cov_ratio` of the kept tokens (at least one), drawn from those whose covariance lies between the
    bounds and that PPO does not clip already. The draw depends on `seed` alone; None draws from torch's global
    generator, as the reference does."""
    if clip_cov_ratio <= 0:
        raise ValueError(f"clip_cov_ratio={clip_cov_ratio} must be positive: it is the share of tokens to silence.")
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    unclipped, clipped = _surrogates(log_ratio, advantages, low, high)
    covariance = token_covariance(log_prob, advantages, response_mask)
    eligible = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & (clipped <= unclipped)

    candidates = torch.nonzero(eligible.flatten()).flatten()
    num_chosen = max(int(clip_cov_ratio * response_mask.sum().item()), 1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[:num_chosen]
    chosen = torch.zeros(eligible.numel(), dtype=torch.bool, device=eligible.device)
    chosen[candidates[order.to(candidates.device)]] = True
    return chosen.view_as(eligible)


@register_token_loss("clip_cov", select=select_clip_cov)
def compute_policy_loss_clip_cov(
    tokens: Tokens, *, low: float, high: float, loss_selection: torch.Tensor
) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and 0 for selected tokens."""
    log_ratio = tokens.log_ratio()
    losses = torch.maximum(*_surrogates(log_ratio, tokens.advantages, low, high))
    losses = torch.where(loss_selection, 0.0, losses)
    return losses, {"actor/pg_clipfrac": loss_selection, "actor/ppo_kl": -log_ratio}


def _surrogates(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
