"""Correction for runs that know the mismatch only in the update: without a pass of its own for the old log-probs.

The same weights and rules as `algorithm.rollout_correction` has elsewhere. In bypass mode the engine is the old policy,
and the policy that is being trained is compared with it; otherwise the interpolated old policy is. A rejected token
adds nothing to the loss; it still counts among the tokens and sequences of the mini-batch that losses are divided by,
because those are fixed before the first micro-batch. A mean within a row is over the tokens that are left.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dovetail.algorithms.rollout_correction import compute_rollout_correction_weights, rejection_mask
from dovetail.config.algorithm import RolloutCorrectionConfig


class CorrectionTerms(NamedTuple):
    """`response_mask` without rejected tokens; `weights` only where the ratio of the loss is not against the engine."""

    response_mask: Tensor
    weights: Tensor | None


def correction_terms(
    log_prob: Tensor, engine_log_prob: Tensor, response_mask: Tensor, settings: RolloutCorrectionConfig
) -> CorrectionTerms:
    """Weights and rejection for one micro-batch; rows do not depend on each other. `log_prob` carries no gradient."""
    log_ratio = log_prob.float() - engine_log_prob.float()
    kept, weights = response_mask, None
    if settings.rollout_rs is not None:
        kept = rejection_mask(log_ratio, response_mask, settings.rollout_rs, settings.rollout_rs_threshold)
    ratio_is_to_engine = settings.bypass_mode and settings.loss_type != "reinforce"
    if settings.rollout_is is not None and not ratio_is_to_engine:
        weights = compute_rollout_correction_weights(
            log_ratio, response_mask, settings.rollout_is, settings.weight_threshold
        )
    return CorrectionTerms(kept, weights)
