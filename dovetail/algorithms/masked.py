"""Means, variances and whitening over the tokens a mask keeps. Masked-out values never matter, not even NaN."""

from __future__ import annotations

import torch


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    # Selecting instead of multiplying: padding may hold NaN or inf, and 0 * NaN is NaN.
    return torch.where(mask.bool(), values, 0.0).sum(dim=dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean over kept tokens; 0 where nothing is kept."""
    return masked_sum(values, mask, dim) / mask.sum(dim=dim).clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance over kept tokens; 0 when fewer than two are kept (there is no spread to measure)."""
    centered = values - masked_mean(values, mask)
    num_kept = mask.sum()
    divisor = num_kept - 1 if unbiased else num_kept
    return masked_sum(centered.square(), mask) / divisor.clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """Scale to unit variance over kept tokens, and to mean 0 unless `shift_mean=False`.

    Positions outside the mask are transformed too, not zeroed: multiply by the mask where that matters.
    """
    mean = masked_mean(values, mask)
    centered = values - mean
    # A second time: of many equal values the first mean is off by a rounding error, which 1e-8 would blow up.
    centered = centered - masked_mean(centered, mask)
    whitened = centered * torch.rsqrt(masked_var(centered, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def moved_to_kept(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with what lies on tokens that the mask leaves out added to the last kept token before them, or else to
    the first kept one. A row that keeps no token stays as it is."""
    kept = mask.bool()
    rows = ((values != 0) & ~kept).any(dim=-1) & kept.any(dim=-1)
    if not rows.any():
        return values
    before = torch.where(kept[rows], torch.arange(kept.shape[1], device=kept.device), -1).cummax(dim=-1).values
    places = torch.where(before >= 0, before, kept[rows].int().argmax(dim=-1, keepdim=True))
    moved = torch.zeros_like(values[rows]).scatter_add_(-1, places, values[rows])
    return values.index_put((rows,), moved)


def compute_response_mask(responses: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The part of `attention_mask` (prompt and response) that covers the right-aligned response columns."""
    return attention_mask[:, attention_mask.shape[1] - responses.shape[1] :]


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """bf16 and fp16 become float32: eight bits of mantissa cannot carry a log-ratio near zero."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
