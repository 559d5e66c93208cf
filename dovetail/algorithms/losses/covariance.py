"""Losses that treat tokens of high covariance apart (https://arxiv.org/abs/2505.22617): Clip-Cov and KL-Cov.

Covariance: how strongly a token's advantage and log-prob move together, over the whole mini-batch. The tokens with the
largest values drive the policy's entropy down. Which tokens those are depends on every row, so a loss that holds only
some rows must be handed the choice. Clip-Cov is PPO with a few of them, drawn at random, left without gradient; KL-Cov
has no clip, and they pay a KL penalty.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import (
    MAX_LOG_RATIO,
    TokenLosses,
    Tokens,
    clip_range,
    masked_log_ratio,
    register_token_loss,
)
from dovetail.algorithms.masked import at_least_float32, masked_mean


def token_covariance(log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(A - mean A) (log p - mean log p), means over kept tokens; -inf outside the mask, never among the top."""
    log_prob = at_least_float32(log_prob.detach())
    centered_advantages = advantages - masked_mean(advantages, response_mask)
    centered_log_prob = log_prob - masked_mean(log_prob, response_mask)
    return torch.where(response_mask.bool(), centered_advantages * centered_log_prob, -torch.inf)


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


@torch.no_grad()
def select_kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    kl_cov_ratio: float = 0.0002,
    **_other_losses: object,
) -> torch.Tensor:
    """True for the `kl_cov_ratio` of kept tokens (at least one) with the highest covariance."""
    if not 0 < kl_cov_ratio <= 1:
        raise ValueError(f"kl_cov_ratio={kl_cov_ratio} must be in (0, 1]: it is the share of tokens to penalise.")
    covariance = token_covariance(log_prob, advantages, response_mask).flatten()
    num_tokens = int(response_mask.sum().item())
    num_chosen = min(max(int(num_tokens * kl_cov_ratio), 1), num_tokens)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[torch.topk(covariance, num_chosen).indices] = True
    return chosen.view_as(response_mask)


@register_token_loss("kl_cov", select=select_kl_cov)
def compute_policy_loss_kl_cov(
    tokens: Tokens, *, loss_selection: torch.Tensor, ppo_kl_coef: float = 0.1
) -> TokenLosses:
    """-A r, plus coef |log r| for selected tokens. `actor/ppo_kl` is the mean of |log r| here."""
    ratio, distance = tokens.log_ratio(limited=True).exp(), tokens.log_ratio().abs()
    losses = -tokens.advantages * ratio + torch.where(loss_selection, ppo_kl_coef * distance, 0.0)
    return losses, {"actor/ppo_kl": distance}
