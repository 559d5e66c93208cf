"""GPG (https://arxiv.org/abs/2504.02546): the plain policy gradient, no ratio, no clip."""

from __future__ import annotations

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("gpg")
def compute_policy_loss_gpg(tokens: Tokens) -> TokenLosses:
    """-A log p."""
    return -tokens.advantages * tokens.kept_log_prob, {}
