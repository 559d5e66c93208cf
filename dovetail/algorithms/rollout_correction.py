"""Correct for the engine not being the policy: importance weights and rejection of tokens or sequences.

The engine samples with other kernels, precision, or weights than the trainer scores with. `log_ratio` is
log(trainer / engine) of each sampled token. Weights carry no gradient: they change the measure, not the objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dovetail.algorithms.kl import k3_kl
from dovetail.algorithms.masked import at_least_float32, masked_mean, masked_sum
from dovetail.algorithms.off_policy_metrics import compute_is_metrics, compute_offpolicy_metrics, limit_weights

REJECTION_RULES = tuple(
    f"{level}_{estimator}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for estimator in ("k1", "k2", "k3")
    # The largest k1 alone would miss tokens that err on the other side.
    if (level, estimator) != ("seq_max", "k1")
)

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class _Rule:
    name: str
    lower: float | None  # in the units of the estimator; only k1 can be negative
    upper: float

    @property
    def level(self) -> str:
        return self.name.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        return self.name.rpartition("_")[2]

    def accepts(self, statistic: torch.Tensor) -> torch.Tensor:
        accepted = statistic <= self.upper
        return accepted if self.lower is None else accepted & (statistic >= self.lower)


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
    rules = _parse_rules(rollout_rs, rollout_rs_threshold)
    kept = response_mask.bool()
    log_ratio = torch.where(kept, at_least_float32(log_ratio), 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    passed = torch.ones_like(kept)
    metrics: dict[str, float] = {}
    for rule in rules:
        statistic = _statistic(rule, log_ratio, kept)
        rule_passed = rule.accepts(statistic).expand_as(kept)
        passed = passed & rule_passed
        metrics |= _rule_metrics(rule, statistic, rule_passed, kept)
    rejected = kept & ~passed
    metrics["rollout_rs_masked_fraction"] = masked_mean(rejected.float(), kept).item()
    metrics["rollout_rs_seq_masked_fraction"] = masked_mean(rejected.any(-1).float(), kept.any(-1)).item()
    return response_mask * passed.to(response_mask.dtype), metrics


def _statistic(rule: _Rule, log_ratio: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """(rows, width) for a token rule, (rows, 1) for a sequence rule."""
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


def _rule_metrics(rule: _Rule, statistic: torch.Tensor, passed: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
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


def _parse_rules(rollout_rs: str, threshold: float | str | None) -> list[_Rule]:
    names = list(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    unknown = [name for name in names if name not in REJECTION_RULES]
    if unknown or not names:
        raise ValueError(
            f"rollout_rs={rollout_rs!r}: {unknown or 'nothing'} is no rule. Known: {', '.join(REJECTION_RULES)}."
        )
    if threshold is None:
        raise ValueError(f"rollout_rs={rollout_rs!r} needs rollout_rs_threshold, e.g. 2.0 or '0.5_2.0'.")
    specs = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={threshold!r} has {len(specs)} entries for {len(names)} rules; give 1 or as many."
        )
    return [_parse_rule(name, spec) for name, spec in zip(names, specs * (len(names) // len(specs)), strict=True)]


def _parse_rule(name: str, spec: str) -> _Rule:
    is_ratio = name.endswith("k1")
    lower_text, _, upper_text = spec.rpartition("_")
    try:
        upper = float(upper_text)
        lower = float(lower_text) if lower_text else 1.0 / upper
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"rollout_rs_threshold {spec!r} for {name} is not a number or 'low_high'.") from None
    if lower <= 0 or upper <= 0:
        raise ValueError(f"rollout_rs_threshold {spec!r} for {name} must be positive.")
    if not is_ratio and lower_text:
        raise ValueError(f"rollout_rs_threshold {spec!r}: {name} takes one upper bound, not a range.")
    return _Rule(name, math.log(lower), math.log(upper)) if is_ratio else _Rule(name, None, upper)


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
