"""Optimal token baseline (OTB, https://arxiv.org/abs/2602.07078): one baseline per prompt and token position.

The baseline of position t is the mean of the group's returns from t on, weighted by W_t: the squared norm of the score
function, added up over the tokens so far. Needs `sum_pi_squared`: the sum of p^2 over the vocabulary at every token.
"""

from __future__ import annotations

import torch

from dovetail.algorithms.groups import GroupIds, Groups, check_finite_rows
from dovetail.algorithms.masked import at_least_float32
from dovetail.algorithms.registry import register_adv_est

_ROUNDING = 1e-5  # of log-probs in float32, from logits of up to 50


@register_adv_est("optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = False,
    epsilon: float = 1e-8,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t = G_t - sum(W_t G_t) / (sum(W_t) + epsilon) over the group's rows that keep position t.

    W_t adds up 1 - 2 p(token) + sum of p^2, times the squared importance weight, over kept tokens up to t. A group of
    one has baseline 0. `handle_zero_tail`: so has what the longest row has beyond the second longest, where it would be
    its own baseline.
    """
    check_finite_rows(token_level_rewards.sum(dim=-1))
    kept = response_mask.bool()
    returns = _returns(token_level_rewards, kept)
    energy = torch.where(kept, _path_energy(old_log_probs, sum_pi_squared, rollout_is_weights, kept), 0.0)
    baselines = _baselines(returns, energy, uid, kept.sum(dim=-1), handle_zero_tail, epsilon)
    return torch.where(kept, returns - baselines, 0.0), returns


@register_adv_est("tir_optimal_token_baseline")
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    uid: GroupIds,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **_other_estimators: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where tools write into a response: position t is the t-th token that the policy wrote."""
    check_finite_rows(token_level_rewards.sum(dim=-1))
    kept = response_mask.bool()
    returns = _returns(token_level_rewards, kept)
    energy = _path_energy(old_log_probs, sum_pi_squared, rollout_is_weights, kept)
    # Kept tokens first, in their order.
    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    lengths = kept.sum(dim=-1)
    written = torch.arange(kept.shape[1], device=kept.device) < lengths[:, None]
    packed_returns = torch.where(written, returns.gather(-1, order), 0.0)
    packed_energy = torch.where(written, energy.gather(-1, order), 0.0)
    packed = packed_returns - _baselines(packed_returns, packed_energy, uid, lengths, handle_zero_tail, epsilon)
    advantages = torch.zeros_like(returns).scatter_(-1, order, packed)
    return torch.where(kept, advantages, 0.0), returns


def _returns(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The reward still to come from kept tokens."""
    return torch.where(kept, at_least_float32(rewards), 0.0).flip(-1).cumsum(dim=-1).flip(-1)


def _path_energy(
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
    kept: torch.Tensor,
) -> torch.Tensor:
    """W_t: squared norms of the score function over the logits, added up over kept tokens up to t."""
    tokens = 1 - 2 * at_least_float32(old_log_probs).exp() + at_least_float32(sum_pi_squared)
    # Of a nearly certain token rounding alone is left, of either sign: weights that cancel would make a huge baseline.
    tokens = torch.where(tokens.abs() < _ROUNDING, 0.0, tokens)
    if rollout_is_weights is not None:
        tokens = tokens * rollout_is_weights.square()
    return torch.where(kept, tokens, 0.0).cumsum(dim=-1)


def _baselines(
    returns: torch.Tensor,
    energy: torch.Tensor,
    uid: GroupIds,
    lengths: torch.Tensor,
    handle_zero_tail: bool,
    epsilon: float,
) -> torch.Tensor:
    """One for each row and position; `energy` is 0 where a row does not keep a position."""
    groups = Groups(uid, lengths.float())
    numerator, denominator = groups.sum_rows(returns * energy), groups.sum_rows(energy)
    baselines = (numerator / (denominator + epsilon)).to(returns.dtype)[groups.number]
    # A row that keeps nothing is nobody's company.
    company = groups.sum((lengths > 0).float())[groups.number]
    baselines = torch.where((company > 1)[:, None], baselines, 0.0)
    if handle_zero_tail:
        ranked = groups.rank(lengths)
        first = torch.cumsum(groups.size, dim=0) - groups.size
        next_row = ranked[(first + 1).clamp(max=len(ranked) - 1)]
        second = torch.where(groups.size > 1, lengths[next_row], 0)[groups.number]
        positions = torch.arange(returns.shape[1], device=returns.device)
        alone = (lengths > second)[:, None] & (positions >= second[:, None])
        baselines = torch.where(alone, 0.0, baselines)
    return baselines
