"""VESPO (https://arxiv.org/abs/2602.10693): REINFORCE weighted by a smooth function of the sequence's importance ratio.

The ratio is a product over the sequence, not normalised by length: nothing favours long or short responses.
"""

from __future__ import annotations

import math

import torch

from dovetail.algorithms.losses.ratio import MAX_LOG_RATIO, TokenLosses, Tokens, register_token_loss

# As in the paper's code: below a ratio of 1e-8 the weight is 0 for any useful k.
_MIN_LOG_RATIO = math.log(1e-8)


@register_token_loss("vespo")
def compute_policy_loss_vespo(
    tokens: Tokens,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> TokenLosses:
    """-stop_gradient(phi(W)) A log p, W = product of the row's ratios p / p_old, phi(W) = W^k exp(lambda (1 - W)).

    k and lambda are `_pos` for advantages from 0 up, else `_neg`. phi(1) is 1; a larger k lowers the weight of W < 1, a
    larger lambda that of W > 1.
    """
    with torch.no_grad():
        log_ratio = tokens.log_ratio(limited=True)
        log_w = log_ratio.sum(dim=-1, keepdim=True).clamp(_MIN_LOG_RATIO, MAX_LOG_RATIO)
        positive = tokens.advantages >= 0
        k = torch.where(positive, vespo_k_pos, vespo_k_neg)
        decay = torch.where(positive, vespo_lambda_pos, vespo_lambda_neg)
        weight = (k * log_w - decay * log_w.expm1()).exp()
    return -weight * tokens.advantages * tokens.kept_log_prob, {
        "actor/vespo_weight": weight,
        "actor/ppo_kl": -log_ratio,
    }
