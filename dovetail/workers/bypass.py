"""Bypass mode: the engine's log-probs stand in for the old ones, so the mismatch is known only in the update.

The same weights and rules as `algorithm.rollout_correction` has elsewhere, with the policy that is being trained in the
place of the old one. A rejected token adds nothing to the loss; it still counts in the means that losses are divided
by, because those are fixed before the first micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dovetail.algorithms.rollout_correction import compute_rollout_correction_weights, compute_rollout_rejection_mask
from dovetail.config.algorithm import RolloutCorrectionConfig


class BypassTerms(NamedTuple):
    """`response_mask` without rejected tokens; `weights` only for losses that have no ratio of their own."""

    response_mask: Tensor
    weights: Tensor | None


def bypass_terms(
    log_prob: Tensor, engine_log_prob: Tensor, response_mask: Tensor, settings: RolloutCorrectionConfig
) -> BypassTerms:
    """Weights and rejection for one micro-batch; rows do not depend on each other. `log_prob` carries no gradient."""
    log_ratio = log_prob.float() - engine_log_prob.float()
    kept, weights = response_mask, None
    if settings.rollout_rs is not None and bool(response_mask.any()):
        kept, _ = compute_rollout_rejection_mask(
            log_ratio, response_mask, settings.rollout_rs, settings.rollout_rs_threshold
        )
    if settings.loss_type == "reinforce" and settings.rollout_is is not None:
        weights = compute_rollout_correction_weights(
            log_ratio, response_mask, settings.rollout_is, settings.weight_threshold
        )
    return BypassTerms(kept, weights)
