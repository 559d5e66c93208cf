"""How far the trainer's policy is from the engine that sampled: KL, perplexity, chi-squared, effective sample size.

Computed once per step on the whole batch; plain floats. All functions want at least one kept token; rows that keep none
(failed, cut off, rejected) are left out of every mean.
"""

from __future__ import annotations

import math

import torch

from dovetail.algorithms.kl import k3_kl
from dovetail.algorithms.masked import at_least_float32, masked_mean, masked_sum

_MAX_LOG_RATIO = 20.0


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, float]:
    """KL(engine, trainer) by k1 (`kl`) and k3 (`k3_kl`), perplexities per sequence, chi-squared of the weights.

    Without `rollout_log_prob` only the trainer's perplexity.
    """
    rows = response_mask.bool().any(dim=-1)
    old_log_prob, response_mask = old_log_prob[rows], response_mask[rows]
    rollout_log_prob = None if rollout_log_prob is None else rollout_log_prob[rows]
    trainer = masked_mean(at_least_float32(old_log_prob), response_mask, dim=-1)
    metrics = {"training_ppl": (-trainer).exp().mean(), "training_log_ppl": -trainer.mean()}
    if rollout_log_prob is not None:
        log_ratio = at_least_float32(old_log_prob) - at_least_float32(rollout_log_prob)
        engine = masked_mean(at_least_float32(rollout_log_prob), response_mask, dim=-1)
        log_ppl_diff = engine - trainer
        clamped = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        row_log_ratio = masked_sum(log_ratio, response_mask, dim=-1).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        metrics |= {
            "kl": masked_mean(-log_ratio, response_mask),
            "k3_kl": masked_mean(k3_kl(log_ratio), response_mask),
            "rollout_ppl": (-engine).exp().mean(),
            "rollout_log_ppl": -engine.mean(),
            "log_ppl_diff": log_ppl_diff.mean(),
            "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
            "log_ppl_diff_max": log_ppl_diff.max(),
            "log_ppl_diff_min": log_ppl_diff.min(),
            "ppl_ratio": log_ppl_diff.exp().mean(),
            "chi2_token": masked_mean((2.0 * clamped).exp(), response_mask) - 1.0,
            "chi2_seq": (2.0 * row_log_ratio).exp().mean() - 1.0,
        }
    return _floats(metrics)


@torch.no_grad()
def compute_probs_diff_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """|p_trainer - p_engine| over kept tokens, and their Pearson correlation: the first thing to look at.

    The correlation of a constant is not defined and left out.
    """
    kept = response_mask.bool()
    trainer = at_least_float32(old_log_prob)[kept].exp()
    engine = at_least_float32(rollout_log_prob)[kept].exp()
    diff = (trainer - engine).abs()
    several = len(diff) > 1
    metrics = _floats(
        {
            "probs_diff_max": diff.max(),
            "probs_diff_mean": diff.mean(),
            "probs_diff_std": diff.std() if several else diff.new_zeros(()),
            **({"pearson": torch.corrcoef(torch.stack((trainer, engine)))[0, 1]} if several else {}),
        }
    )
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def limit_weights(weights: torch.Tensor, lower: float | None, upper: float) -> torch.Tensor:
    """Truncated at `upper` (TIS); with `lower`, 0 outside the range instead (IcePop)."""
    if lower is None:
        return weights.clamp(max=upper)
    return torch.where((weights >= lower) & (weights <= upper), weights, 0.0)


@torch.no_grad()
def compute_is_metrics(
    weights: torch.Tensor,
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str,
    upper: float,
    lower: float | None = None,
) -> dict[str, float]:
    """Statistics of importance weights, given before they are limited (0 outside the mask).

    What is applied, the limited weights, has mean, spread and effective sample size (1 = all tokens count alike). How
    often the limits bite is counted before: "high" is above `upper`, "low" below `lower`, by default 1 / upper.
    """
    rows = response_mask.bool().any(dim=-1)
    weights, log_ratio, kept = weights[rows], log_ratio[rows], response_mask[rows].bool()
    applied = limit_weights(weights, lower, upper)
    drops = lower is not None
    lower = 1.0 / upper if lower is None else lower
    raw_per_row, per_row = masked_mean(weights, kept, dim=-1), masked_mean(applied, kept, dim=-1)
    if rollout_is == "sequence":
        # From the log-ratios: weights have been limited to exp(+-20) already.
        log_weights = masked_sum(at_least_float32(log_ratio), kept, dim=-1)
        high = (log_weights > math.log(upper)).float().mean()
        low = (log_weights < math.log(lower)).float().mean()
        largest, smallest = log_weights.max().clamp(max=_MAX_LOG_RATIO).exp(), log_weights.min().exp()
    else:
        high = masked_mean((weights > upper).float(), kept)
        low = masked_mean((weights < lower).float(), kept)
        largest, smallest = applied[kept].max(), applied[kept].min()
    mean, mean_square = masked_mean(applied, kept), masked_mean(applied.square(), kept)
    outside = masked_mean(((weights < lower) | (weights > upper)).float(), kept)
    return _floats(
        {
            "rollout_is_mean": mean,
            "rollout_is_max": largest,
            "rollout_is_min": smallest,
            "rollout_is_ratio_fraction_high": high,
            "rollout_is_ratio_fraction_low": low,
            # Not from the mean square: of weights near 1 the difference would be rounding, 2e-4 after the root.
            "rollout_is_std": masked_mean((applied - mean).square(), kept).sqrt(),
            # Without a weight above 0 there is no sample.
            "rollout_is_eff_sample_size": mean.square() / mean_square.clamp(min=torch.finfo(mean.dtype).tiny),
            "rollout_is_seq_mean": per_row.mean(),
            "rollout_is_seq_std": per_row.std() if len(per_row) > 1 else per_row.new_zeros(()),
            "rollout_is_seq_max": per_row.max(),
            "rollout_is_seq_min": per_row.min(),
            "rollout_is_seq_max_deviation": (per_row - 1.0).abs().max(),
            "rollout_is_seq_fraction_high": (raw_per_row > upper).float().mean(),
            "rollout_is_seq_fraction_low": (raw_per_row < lower).float().mean(),
        }
        | ({"rollout_is_oob_ratio": outside} if drops else {})
    )


def _floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """One transfer from the device for all metrics."""
    return dict(zip(metrics, torch.stack([value.float() for value in metrics.values()]).tolist(), strict=True))
