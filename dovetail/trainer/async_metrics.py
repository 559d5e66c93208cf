"""What is reported about responses of older weights: how old they are, and how much of a sample they still are.

A token's version is the global step whose weights sampled it; at step k its lag is (k - 1) - version. Tensors in, plain
floats out; `mask` marks sampled tokens that are trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.algorithms.masked import at_least_float32, masked_mean

MOST_LAGS = 8
"""Lags with a share of their own; the last one counts everything from there on."""

_MAX_LOG_RATIO = 20.0


def token_lags(versions: Tensor, step: int) -> Tensor:
    """Updates between the weights that sampled each token and those that step `step` starts from."""
    return (step - 1) - versions


def staleness_metrics(versions: Tensor, mask: Tensor, step: int) -> dict[str, float]:
    """`async/staleness/mean` and `max` over responses, each by its oldest token, and the share of tokens at each lag;
    `async/updates_crossed`: updates between a response's oldest and newest token.

    Responses without a token that is trained on count nowhere.
    """
    sampled = mask.bool() & (versions >= 0)
    lags = token_lags(versions, step)
    rows = sampled.any(dim=-1)
    if not rows.any():
        return {}
    oldest = lags.masked_fill(~sampled, -1)[rows].amax(dim=-1).float()
    crossed = oldest - lags.masked_fill(~sampled, step)[rows].amin(dim=-1)
    counts = torch.bincount(lags[sampled].clamp(0, MOST_LAGS).long(), minlength=MOST_LAGS + 1)
    shares = (counts / counts.sum()).tolist()
    return {
        "async/staleness/mean": float(oldest.mean()),
        "async/staleness/max": float(oldest.max()),
        "async/updates_crossed/share": float((crossed > 0).float().mean()),
        "async/updates_crossed/max": float(crossed.max()),
        **{f"async/staleness/lag_{lag}": share for lag, share in enumerate(shares)},
    }


def drift_metrics(
    log_probs: Tensor, engine_log_probs: Tensor, versions: Tensor, mask: Tensor, step: int
) -> dict[str, float]:
    """How far the policy has moved from the weights that sampled; `log_probs` are of the weights before the update.

    `async/effective_sample_size`: (sum w)^2 / (n sum w^2) over tokens, w = policy / engine; 1 when all weigh alike.
    `async/fresh_logprob_diff`: mean |log-prob difference| of tokens at lag 0, which only kernels and precision explain:
    if it grows, the engine does not generate with the weights that it says it has.
    """
    kept = mask.bool()
    if not kept.any():
        return {}
    difference = at_least_float32(log_probs) - at_least_float32(engine_log_probs)
    weights = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    mean, mean_square = masked_mean(weights, kept), masked_mean(weights.square(), kept)
    metrics = {"async/effective_sample_size": float(mean.square() / mean_square)}
    fresh = kept & (token_lags(versions, step) == 0)
    if fresh.any():
        metrics["async/fresh_logprob_diff"] = float(masked_mean(difference.abs(), fresh))
    return metrics
