"""REINFORCE with the drift from the old policy reported: -A log p.

With `old_log_prob` = the engine's log-probs and `rollout_is_weights` = policy / engine, this is REINFORCE with
truncated importance sampling and no separate old-policy pass.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, masked_log_prob, masked_log_ratio, register_token_loss


@register_token_loss("reinforce", default_agg_mode="seq-mean-token-sum")
def compute_policy_loss_reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
) -> TokenLosses:
    """-A log p, weighted by `rollout_is_weights` when given."""
    losses = -advantages * masked_log_prob(log_prob, response_mask)
    return losses, {"actor/ppo_kl": -masked_log_ratio(log_prob, old_log_prob, response_mask)}
