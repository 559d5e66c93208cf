"""GSPO (https://arxiv.org/abs/2507.18071): one importance ratio per sequence, the geometric mean of its tokens'."""

from __future__ import annotations

import torch

from dovetail.algorithms.losses.ratio import TokenLosses, Tokens, register_token_loss
from dovetail.algorithms.masked import masked_mean

_MAX_SEQUENCE_LOG_RATIO = 10.0


@register_token_loss("gspo", default_agg_mode="seq-mean-token-mean")
def compute_policy_loss_gspo(tokens: Tokens, *, low: float, high: float) -> TokenLosses:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean log-ratio of the sequence).

    Clipping sees the value of s; the gradient of s with respect to each token's log-prob is s itself, undivided by
    length, because the aggregation divides by it. Sensible ranges are small (3e-4, 4e-4).
    """
    log_ratio, advantages = tokens.log_ratio(), tokens.advantages
    sequence_log_ratio = masked_mean(log_ratio.detach(), tokens.response_mask, dim=-1).unsqueeze(-1)
    token_log_prob = tokens.kept_log_prob
    log_s = token_log_prob - token_log_prob.detach() + sequence_log_ratio
    ratio = log_s.clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    return losses, {
        "actor/pg_clipfrac": clipped > unclipped,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(ratio),
    }
