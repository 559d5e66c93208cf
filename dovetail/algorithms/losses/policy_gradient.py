"""Losses without a ratio or a clip: GPG, REINFORCE and DRO."""

from __future__ import annotations

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("gpg")
def compute_policy_loss_gpg(tokens: Tokens) -> TokenLosses:
    """GPG (https://arxiv.org/abs/2504.02546), the plain policy gradient: -A log p."""
    return -tokens.advantages * tokens.kept_log_prob, {}


@register_token_loss("reinforce", default_agg_mode="seq-mean-token-sum")
def compute_policy_loss_reinforce(tokens: Tokens) -> TokenLosses:
    """-A log p, weighted by `rollout_is_weights` when given; reports the drift from the old policy.

    With `old_log_prob` = the engine's log-probs and `rollout_is_weights` = policy / engine, this is REINFORCE with
    truncated importance sampling and no separate old-policy pass.
    """
    return -tokens.advantages * tokens.kept_log_prob, {"actor/ppo_kl": -tokens.log_ratio()}


@register_token_loss("dro")
def compute_policy_loss_dro(tokens: Tokens, *, dro_beta: float = 0.1) -> TokenLosses:
    """DRO (https://arxiv.org/abs/2405.19107): -A log p + (beta / 2) (log p - log p_old)^2."""
    log_ratio = tokens.log_ratio()
    losses = -tokens.advantages * tokens.kept_log_prob + 0.5 * dro_beta * log_ratio.square()
    return losses, {"actor/ppo_kl": -log_ratio}
