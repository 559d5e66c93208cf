"""How strongly each token's advantage and log-prob move together, over the whole mini-batch.

The tokens with the largest values drive the policy's entropy down (https://arxiv.org/abs/2505.22617). Which tokens
those are depends on every row, so a loss that holds only some rows must be handed the choice.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.masked import at_least_float32, masked_mean


def token_covariance(log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(A - mean A) (log p - mean log p), means over kept tokens; -inf outside the mask, never among the top."""
    log_prob = at_least_float32(log_prob.detach())
    centered_advantages = advantages - masked_mean(advantages, response_mask)
    centered_log_prob = log_prob - masked_mean(log_prob, response_mask)
    return torch.where(response_mask.bool(), centered_advantages * centered_log_prob, -torch.inf)
