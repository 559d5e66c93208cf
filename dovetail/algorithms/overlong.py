"""DAPO's soft punishment of overlong answers (https://arxiv.org/abs/2503.14476)."""

from __future__ import annotations

import torch


def compute_overlong_penalty(
    response_lengths: torch.Tensor, max_response_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> torch.Tensor:
    """One penalty per row: 0 up to `max - buffer` tokens, then falling linearly to `-penalty_factor` at `max`."""
    if not 0 < buffer_length <= max_response_length:
        raise ValueError(
            f"overlong_buffer.len={buffer_length} must be between 1 and the longest response {max_response_length}."
        )
    excess = response_lengths.to(torch.get_default_dtype()) - (max_response_length - buffer_length)
    return (-excess / buffer_length * penalty_factor).clamp(max=0.0)
