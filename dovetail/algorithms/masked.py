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
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def compute_response_mask(responses: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The part of `attention_mask` (prompt and response) that covers the right-aligned response columns."""
    return attention_mask[:, attention_mask.shape[1] - responses.shape[1] :]


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """bf16 and fp16 become float32: eight bits of mantissa cannot carry a log-ratio near zero."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
