"""Correct for the engine not being the policy: importance weights and rejection of tokens or sequences.

The engine samples with other kernels, precision, or weights than the trainer scores with. `log_ratio` is
log(trainer / engine) of each sampled token. Weights carry no gradient: they change the measure, not the objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dovetail.algorithms.kl import k3_kl
from dovetail.algorithms.masked import at_least_float32, masked_mean, masked_sum
from dovetail.algorithms.off_policy_metrics import compute_is_metrics, compute_offpolicy_metrics, limit_weights
from dovetail.config.rejection import RejectionRule, rejection_rules

# exp(20) is 5e8: a product of ratios over a long answer would overflow otherwise.
MAX_LOG_WEIGHT = 20.0


def _accepts(rule: RejectionRule, statistic: torch.Tensor) -> torch.Tensor:
    accepted = statistic <= rule.upper
    return accepted if rule.lower is None else accepted & (statistic >= rule.lower)


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mask without the tokens or sequences on which trainer and engine disagree too much, and metrics.

    A rule is `<level>_<estimator>`: level `token`, `seq_sum`, `seq_mean` or `seq_max`; estimator k1 = -log_ratio,
    k2 = log_ratio^2 / 2, k3 = exp(log_ratio) - 1 - log_ratio. Several rules, comma separated, must all pass.
    Thresholds: one for all rules, or one per rule, comma separated. For k1 a ratio bound: `2.0` means [1/2, 2],
    `"0.5_2.0"` gives both. For k2 and k3 an upper bound of the estimate.
    """
    kept = response_mask.bool()
    metrics: dict[str, float] = {}
    for verdict in _verdicts(log_ratio, kept, rollout_rs, rollout_rs_threshold):
        metrics |= _rule_metrics(verdict, kept)
    mask = rejection_mask(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)
    rejected = kept & ~mask.bool()
    metrics["rollout_rs_masked_fraction"] = masked_mean(rejected.float(), kept).item()
    metrics["rollout_rs_seq_masked_fraction"] = masked_mean(rejected.any(-1).float(), kept.any(-1)).item()
    return mask, metrics


@torch.no_grad()
def rejection_mask(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, rollout_rs: str, rollout_rs_threshold: float | str | None
) -> torch.Tensor:
    """The mask of `compute_rollout_rejection_mask` alone: metrics are numbers on the host, which waits for them."""
    mask = response_mask
    for verdict in _verdicts(log_ratio, response_mask.bool(), rollout_rs, rollout_rs_threshold):
        mask = mask * verdict.passed.to(mask.dtype)
    return mask


class _Verdict(NamedTuple):
    rule: RejectionRule
    statistic: torch.Tensor
    """(rows, width) for a token rule, (rows, 1) for a sequence rule."""
    passed: torch.Tensor
    """(rows, width) bool."""


def _verdicts(
    log_ratio: torch.Tensor, kept: torch.Tensor, rollout_rs: str, rollout_rs_threshold: float | str | None
) -> Iterator[_Verdict]:
    log_ratio = torch.where(kept, at_least_float32(log_ratio), 0.0).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    for rule in rejection_rules(rollout_rs, rollout_rs_threshold):
        statistic = _statistic(rule, log_ratio, kept)
        yield _Verdict(rule, statistic, _accepts(rule, statistic).expand_as(kept))


def _statistic(rule: RejectionRule, log_ratio: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if rule.estimator == "k1":
        tokens = -log_ratio
    elif rule.estimator == "k2":
        tokens = 0.5 * log_ratio.square()
    else:
        tokens = k3_kl(log_ratio)
    match rule.level:
        case "token":
            return tokens
        case "seq_sum":
            return masked_sum(tokens, kept, dim=-1).unsqueeze(-1)
        case "seq_mean":
            return masked_mean(tokens, kept, dim=-1).unsqueeze(-1)
    # k2 and k3 are never negative, so 0 outside the mask does not win the maximum.
    return torch.where(kept, tokens, 0.0).amax(dim=-1, keepdim=True)


def _rule_metrics(verdict: _Verdict, kept: torch.Tensor) -> dict[str, float]:
    rule, statistic, passed = verdict
    prefix = f"rollout_rs_{rule.name}"
    rows = kept.any(dim=-1)
    tokens = statistic.expand_as(kept)
    rejected = kept & ~passed
    metrics = {
        f"{prefix}_mean": masked_mean(tokens, kept),
        f"{prefix}_masked_fraction": masked_mean(rejected.float(), kept),
        f"{prefix}_seq_masked_fraction": masked_mean(rejected.any(dim=-1).float(), rows),
    }
    per_row = masked_mean(tokens, kept, dim=-1)[rows]
    observed = tokens[kept] if rule.level == "token" else per_row
    if observed.numel():
        lower = -torch.inf if rule.lower is None else rule.lower
        clamped = tokens.clamp(min=0.0 if rule.lower is None else rule.lower, max=rule.upper)
        variance = masked_mean(clamped.square(), kept) - masked_mean(clamped, kept).square()
        metrics |= {
            f"{prefix}_max": observed.max(),
            f"{prefix}_min": observed.min(),
            f"{prefix}_std": variance.clamp(min=0.0).sqrt(),
            f"{prefix}_fraction_high": (observed > rule.upper).float().mean(),
            f"{prefix}_fraction_low": (observed < lower).float().mean(),
            f"{prefix}_seq_mean": per_row.mean(),
            f"{prefix}_seq_std": per_row.std() if per_row.numel() > 1 else per_row.new_zeros(()),
            f"{prefix}_seq_max": per_row.max(),
            f"{prefix}_seq_min": per_row.min(),
            f"{prefix}_seq_max_deviation": per_row.abs().max(),
            f"{prefix}_seq_fraction_high": (per_row > rule.upper).float().mean(),
            f"{prefix}_seq_fraction_low": (per_row < lower).float().mean(),
        }
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


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
    return weights / _norm_factor(weights, response_mask, rollout_is) if rollout_is_batch_normalize else weights


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
        lower, upper = _weight_bounds(rollout_is_threshold)
        raw = _raw_weights(log_ratio, response_mask, rollout_is)
        metrics |= compute_is_metrics(raw, log_ratio, response_mask, rollout_is, upper, lower)
        weights = limit_weights(raw, lower, upper)
        if rollout_is_batch_normalize:
            factor = _norm_factor(weights, response_mask, rollout_is)
            weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, float(factor)
    kept_mask = response_mask
    if rollout_rs is not None:
        kept_mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= rejection_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return RolloutCorrection(weights, kept_mask, {f"rollout_corr/{name}": value for name, value in metrics.items()})


@torch.no_grad()
def off_policy_mask(
    log_prob: torch.Tensor,
    sampling_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Tokens that the policy loss leaves out (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556), as a bool tensor:

        A < 0  and  mean over the row's kept tokens of log(p_sampling / p) > threshold

    The policy has left these responses already; pushing it further from them is what destabilises. Responses with a
    positive advantage stay, whatever their distance.
    """
    distance = torch.where(response_mask.bool(), at_least_float32(sampling_log_prob) - at_least_float32(log_prob), 0.0)
    far = masked_mean(distance, response_mask, dim=-1) > threshold
    return (advantages < 0) & far.unsqueeze(-1) & response_mask.bool()


def interpolation_weights(weight_version: torch.Tensor, step: int) -> torch.Tensor:
    """Of each token, how much of the way from the weights that sampled it the update's old policy has come.

    alpha = (v_prox - v_token) / (v_now - v_token): at step k the old policy is version k - 1, and the update makes
    version k. Fresh tokens, and those that no engine sampled (version -1), have 0.
    """
    age = torch.where(weight_version >= 0, (step - 1) - weight_version, 0).clamp(min=0).float()
    return age / (age + 1)


@torch.no_grad()
def interpolate_old_log_prob(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    """Old log-probs without a pass of their own (`prox=loglinear`): between the engine's and the update's, by version.

    With alpha 0 they are the engine's, with 1 the update's.
    """
    engine = at_least_float32(rollout_log_prob)
    return engine + alpha * (at_least_float32(log_prob) - engine)


def _raw_weights(log_ratio: torch.Tensor, response_mask: torch.Tensor, rollout_is: str) -> torch.Tensor:
    log_ratio = torch.where(response_mask.bool(), at_least_float32(log_ratio), 0.0)
    if rollout_is == "sequence":
        log_ratio = masked_sum(log_ratio, response_mask, dim=-1).unsqueeze(-1).expand_as(log_ratio)
    elif rollout_is != "token":
        raise ValueError(f"rollout_is={rollout_is!r} is not known; use 'token' or 'sequence'.")
    return log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp() * response_mask


def _norm_factor(weights: torch.Tensor, response_mask: torch.Tensor, rollout_is: str) -> torch.Tensor:
    """The mean over tokens, or over sequences; 1 where there is no weight above 0."""
    mean = masked_mean(weights, response_mask)
    if rollout_is == "sequence":
        mean = masked_mean(masked_mean(weights, response_mask, dim=-1), response_mask.sum(dim=-1) > 0)
    return torch.where(mean > 1e-8, mean, 1.0)


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
