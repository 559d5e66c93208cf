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


def apply_overlong_penalty(
    token_level_scores: torch.Tensor,
    response_mask: torch.Tensor,
    max_response_length: int,
    buffer_length: int,
    penalty_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with the penalty added on each row's last kept token, and the penalties (one per row)."""
    kept = response_mask.bool()
    width = response_mask.shape[1]
    # The length of an answer runs to its last token, tool output in between included.
    lengths = torch.where(kept, torch.arange(1, width + 1, device=kept.device), 0).amax(dim=-1)
    penalties = compute_overlong_penalty(lengths, max_response_length, buffer_length, penalty_factor)
    penalties = torch.where(lengths > 0, penalties, 0.0).to(token_level_scores.dtype)
    last = (lengths - 1).clamp(min=0).unsqueeze(-1)
    return token_level_scores.scatter_add(1, last, penalties.unsqueeze(-1)), penalties
