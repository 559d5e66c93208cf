"""PPO's clipped value loss, for the critic."""

from __future__ import annotations

import torch

from dovetail.algorithms.aggregate import BatchCounts, agg_loss, token_share
from dovetail.algorithms.masked import at_least_float32


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    *,
    counts: BatchCounts | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of max((V - G)^2, (clip(V, V_old -+ range) - G)^2); and the share of tokens where the clip was worse."""
    kept = response_mask.bool()
    # Padding may hold anything; selecting before the squares keeps it out of the gradient.
    vpreds = torch.where(kept, at_least_float32(vpreds), 0.0)
    returns = torch.where(kept, at_least_float32(returns), 0.0)
    values = torch.where(kept, at_least_float32(values), 0.0)

    free = (vpreds - returns).square()
    near = (vpreds.clamp(values - cliprange_value, values + cliprange_value) - returns).square()
    loss = agg_loss(
        torch.maximum(free, near), response_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor
    )
    clipfrac = token_share((near > free).to(free.dtype), response_mask, counts)
    return 0.5 * loss, clipfrac.detach()
