"""DRO (https://arxiv.org/abs/2405.19107): policy gradient with a quadratic pull towards the old policy, no clip."""

from __future__ import annotations

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss


@register_token_loss("dro")
def compute_policy_loss_dro(tokens: Tokens, *, dro_beta: float = 0.1) -> TokenLosses:
    """-A log p + (beta / 2) (log p - log p_old)^2."""
    log_ratio = tokens.log_ratio()
    losses = -tokens.advantages * tokens.kept_log_prob + 0.5 * dro_beta * log_ratio.square()
    return losses, {"actor/ppo_kl": -log_ratio}
