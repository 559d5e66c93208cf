"""GMPO (https://arxiv.org/abs/2507.20673): the geometric mean of clipped token ratios, one loss per sequence.

There is nothing to aggregate over tokens, so `loss_agg_mode` is ignored: the result is the mean over the mini-batch's
rows that keep a token. Advantages should be constant within a row; their mean is used.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, row_share, token_share
from dovetail.algorithms.losses.ratio import MAX_LOG_RATIO, clip_range, masked_log_ratio
from dovetail.algorithms.masked import masked_mean
from dovetail.algorithms.registry import register_policy_loss


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    counts: BatchCounts | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    **_other_losses: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A exp(mean of clipped log-ratios); the clip is in log space, [-low, high], on the side where A would gain."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    within = log_ratio.clamp(-low, high)
    direction = torch.sign(advantages)
    pessimistic = direction * torch.minimum(direction * log_ratio, direction * within)

    ratio = masked_mean(pessimistic, response_mask, dim=-1).clamp(max=MAX_LOG_RATIO).exp()
    row_losses = -masked_mean(advantages, response_mask, dim=-1) * ratio
    if rollout_is_weights is not None:
        # One weight per sequence, the geometric mean again; the offset keeps a weight of 0 finite.
        row_losses = row_losses * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, dim=-1).exp()

    with torch.no_grad():
        outside = log_ratio != within
        metrics = {
            "actor/pg_clipfrac": token_share((outside & (advantages > 0)).to(ratio.dtype), response_mask, counts),
            "actor/ppo_kl": token_share(-log_ratio, response_mask, counts),
            "actor/pg_clipfrac_lower": token_share((outside & (advantages < 0)).to(ratio.dtype), response_mask, counts),
        }
    return row_share(row_losses, response_mask, counts), metrics
