"""What policy losses share: the log-ratio of new to old policy, clip ranges, and the last step to a scalar."""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, agg_loss
from dovetail.algorithms.masked import at_least_float32

# exp(20) is 5e8: no update should weigh a token more, and exp must not overflow on a token the policy has abandoned.
MAX_LOG_RATIO = 20.0


def masked_log_prob(log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Log-probs in at least float32, 0 outside the mask: padding may hold -inf, and must not reach a gradient."""
    return torch.where(response_mask.bool(), at_least_float32(log_prob), 0.0)


def masked_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """log(new / old) of every token, 0 outside the mask. Its negation is a one-sample estimate of KL(old, new)."""
    difference = at_least_float32(log_prob) - at_least_float32(old_log_prob)
    return torch.where(response_mask.bool(), difference, 0.0)


def clip_range(clip_ratio: float, low: float | None, high: float | None) -> tuple[float, float]:
    """How far below and above 1 the ratio may go; `clip_ratio` stands in for a side that is not set."""
    low = clip_ratio if low is None else low
    high = clip_ratio if high is None else high
    if low < 0 or high < 0:
        raise ValueError(f"clip range ({low}, {high}) must not be negative: it is a distance from ratio 1.")
    return low, high


def weighted_agg_loss(
    losses: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    rollout_is_weights: torch.Tensor | None,
    counts: BatchCounts | None,
    loss_scale_factor: float | None,
) -> torch.Tensor:
    """Aggregate token losses after weighting them by training policy / rollout policy (rollout correction)."""
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor)
