"""REINFORCE with the drift from the old policy reported: -A log p.

With `old_log_prob` = the engine's log-probs and `rollout_is_weights` = policy / engine, this is REINFORCE with
truncated importance sampling and no separate old-policy pass.
"""

from __future__ import annotations

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("reinforce", default_agg_mode="seq-mean-token-sum")
def compute_policy_loss_reinforce(tokens: Tokens) -> TokenLosses:
    """-A log p, weighted by `rollout_is_weights` when given."""
    return -tokens.advantages * tokens.kept_log_prob, {"actor/ppo_kl": -tokens.log_ratio()}
