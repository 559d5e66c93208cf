"""Correct for the engine not being the policy: importance weights and rejection of tokens or sequences.

The engine samples with other kernels, precision, or weights than the trainer scores with. `log_ratio` is
log(trainer / engine) of each sampled token. Weights carry no gradient: they change the measure, not the objective.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.algorithms.masked import at_least_float32, masked_mean, masked_sum
from dovetail.algorithms.off_policy_metrics import compute_is_metrics, compute_offpolicy_metrics, limit_weights
from dovetail.algorithms.rejection import compute_rollout_rejection_mask

# exp(20) is 5e8: a product of ratios over a long answer would overflow otherwise.
MAX_LOG_WEIGHT = 20.0


class RolloutCorrection(NamedTuple):
    rollout_is_weights: torch.Tensor | None
    response_mask: torch.Tensor  # without the rejected tokens
    metrics: dict[str, float]  # `rollout_corr/...`


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> torch.Tensor:
    """Weights of every token, 0 outside the mask.

    `rollout_is="token"`: each token's own ratio. `"sequence"`: the product over the row, on all its tokens.
    A number as threshold truncates weights there (TIS); `"low_high"` drops tokens outside the range instead (IcePop).
    `rollout_is_batch_normalize` rescales to mean 1 over tokens, or over sequences.
    """
    lower, upper = _weight_bounds(rollout_is_threshold)
    weights = limit_weights(_raw_weights(log_ratio, response_mask, rollout_is), lower, upper)
    if rollout_is_batch_normalize:
        mean = _mean_weight(weights, response_mask, rollout_is)
        weights = torch.where(mean > 1e-8, weights / mean.clamp(min=1e-8), weights)
    return weights


@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> RolloutCorrection:
    """Weights (None unless `rollout_is`), the mask after rejection (`rollout_rs`), and all mismatch metrics."""
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(
            f"old_log_prob {tuple(old_log_prob.shape)}, rollout_log_prob {tuple(rollout_log_prob.shape)} and "
            f"response_mask {tuple(response_mask.shape)} must have one shape."
        )
    if not response_mask.any():
        raise ValueError("response_mask keeps no token: there is nothing to correct; check generation and filtering.")
    log_ratio = at_least_float32(old_log_prob) - at_least_float32(rollout_log_prob)
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None:
        normalize = rollout_is_batch_normalize
        weights = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, normalize
        )
        raw = _raw_weights(log_ratio, response_mask, rollout_is)
        bounds = _weight_bounds(rollout_is_threshold)
        metrics |= compute_is_metrics(raw, log_ratio, response_mask, rollout_is, bounds[1], bounds[0])
        if normalize:
            truncated = compute_rollout_correction_weights(log_ratio, response_mask, rollout_is, rollout_is_threshold)
            mean = float(_mean_weight(truncated, response_mask, rollout_is))
            metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
    kept_mask = response_mask
    if rollout_rs is not None:
        kept_mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= rejection_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return RolloutCorrection(weights, kept_mask, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def _raw_weights(log_ratio: torch.Tensor, response_mask: torch.Tensor, rollout_is: str) -> torch.Tensor:
    log_ratio = torch.where(response_mask.bool(), at_least_float32(log_ratio), 0.0)
    if rollout_is == "sequence":
        log_ratio = masked_sum(log_ratio, response_mask, dim=-1).unsqueeze(-1).expand_as(log_ratio)
    elif rollout_is != "token":
        raise ValueError(f"rollout_is={rollout_is!r} is not known; use 'token' or 'sequence'.")
    return log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp() * response_mask


def _mean_weight(weights: torch.Tensor, response_mask: torch.Tensor, rollout_is: str) -> torch.Tensor:
    if rollout_is == "token":
        return masked_mean(weights, response_mask)
    return masked_mean(masked_mean(weights, response_mask, dim=-1), response_mask.sum(dim=-1) > 0)


def _weight_bounds(threshold: float | str) -> tuple[float | None, float]:
    """`2.0` -> (None, 2.0); `"0.5_5.0"` -> (0.5, 5.0)."""
    lower_text, _, upper_text = str(threshold).rpartition("_")
    try:
        lower, upper = (float(lower_text) if lower_text else None), float(upper_text)
    except ValueError:
        raise ValueError(
            f"rollout_is_threshold={threshold!r} is neither a number nor 'low_high', e.g. '0.5_5.0'."
        ) from None
    if upper <= 0 or (lower is not None and not 0 < lower < upper):
        raise ValueError(f"rollout_is_threshold={threshold!r} must be positive, and low below high.")
    return lower, upper
