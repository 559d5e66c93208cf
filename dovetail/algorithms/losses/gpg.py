"""GPG (https://arxiv.org/abs/2504.02546): the plain policy gradient, no ratio, no clip."""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts
from dovetail.algorithms.losses.ratio import masked_log_prob, weighted_agg_loss
from dovetail.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    counts: BatchCounts | None = None,
    loss_scale_factor: float | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **_other_losses: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A log p."""
    losses = -advantages * masked_log_prob(log_prob, response_mask)
    loss = weighted_agg_loss(losses, response_mask, loss_agg_mode, rollout_is_weights, counts, loss_scale_factor)
    return loss, {}
