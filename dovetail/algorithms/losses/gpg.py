"""GPG (https://arxiv.org/abs/2504.02546): the plain policy gradient, no ratio, no clip."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, masked_log_prob, register_token_loss


@register_token_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
) -> TokenLosses:
    """-A log p."""
    return -advantages * masked_log_prob(log_prob, response_mask), {}
