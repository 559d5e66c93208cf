"""KL-Cov (https://arxiv.org/abs/2505.22617): no clip; the tokens of highest covariance pay a KL penalty instead."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.covariance import token_covariance
from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


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
