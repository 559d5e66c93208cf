"""One advantage per response, from the scores of its group: GRPO, MaxRL, pass@k, RLOO, OPO, GPG, REINFORCE++ with a
baseline.

The group are the responses to one prompt. An estimator is a function from scores to row advantages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dovetail.algorithms.groups import GroupIds, Groups, outcome_scores, spread_over_tokens
from dovetail.algorithms.registry import AdvantageFn, register_adv_est


def register_outcome_estimator(*names: str) -> Callable[[Callable[..., torch.Tensor]], AdvantageFn]:
    """Decorator: make an estimator of a function `(scores, groups, ...) -> row advantages`.

    The function gets, by keyword, those settings that it names, and `lengths`, the kept tokens of each row.
    """

    def decorate(row_advantages: Callable[..., torch.Tensor]) -> AdvantageFn:
        known = inspect.signature(row_advantages).parameters

        @torch.no_grad()
        def estimator(
            token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: GroupIds, **settings: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scores = outcome_scores(token_level_rewards)
            if "lengths" in known:
                settings["lengths"] = response_mask.sum(dim=-1)
            settings = {key: value for key, value in settings.items() if key in known}
            rows = row_advantages(scores, Groups(uid, scores), **settings)
            advantages = spread_over_tokens(rows, response_mask)
            return advantages, advantages

        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(estimator, attribute, getattr(row_advantages, attribute))
        vars(estimator)["settings_read"] = set(known)
        return register_adv_est(*names)(estimator)

    return decorate


@register_outcome_estimator("grpo", "grpo_vectorized")
def compute_grpo_outcome_advantage(
    scores: torch.Tensor, groups: Groups, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> torch.Tensor:
    """GRPO (https://arxiv.org/abs/2402.03300): A = (R - mean of group) / (std of group + epsilon); a group of one keeps
    its score.

    Dr.GRPO (https://arxiv.org/abs/2503.20783) is this with `norm_adv_by_std_in_grpo=False`, together with
    `loss_agg_mode=seq-mean-token-sum-norm`.
    """
    centered = scores - groups.row_mean(scores)
    return centered / (groups.row_std(scores) + epsilon) if norm_adv_by_std_in_grpo else centered


@register_outcome_estimator("max_rl")
def compute_max_rl_outcome_advantage(scores: torch.Tensor, groups: Groups) -> torch.Tensor:
    """MaxRL (https://arxiv.org/abs/2602.02710): A = (R - mean of group) / mean of group; 0 where all score 0. A group
    of one keeps its score.

    With scores of 0 and 1 the mean is the share of right responses. The gradient is that of the first n - 1 terms of
    log p = -sum_k (1 - p)^k / k, p the chance of a right response; that of (R - mean) alone is the first term's.
    """
    if (scores < 0).any():
        row = int(torch.nonzero(scores < 0)[0])
        raise ValueError(
            f"max_rl: row {row} scored {scores[row].item():g}; it divides by the mean of a group, so scores must not "
            "be negative. Return 0 for a wrong response, or use adv_estimator=grpo."
        )
    mean = groups.row_mean(scores)
    return (scores - mean) / torch.where(mean > 0, mean, 1.0)


@register_outcome_estimator("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    scores: torch.Tensor, groups: Groups, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> torch.Tensor:
    """Pass@k (https://arxiv.org/abs/2503.19595): A = (best - second best) / (std of group + epsilon) for the best row,
    0 for the others.
    """
    if (groups.size < 2).any():
        row = int(torch.nonzero(groups.row_size < 2)[0])
        raise ValueError(
            f"grpo_passk: row {row} is alone in its group; pass@k needs rollout.n >= 2 answers per prompt."
        )
    ranked = groups.rank(scores)
    first = torch.cumsum(groups.size, dim=0) - groups.size
    best = ranked[first]
    lead = scores[best] - scores[ranked[first + 1]]
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.row_std(scores)[best] + epsilon)
    return torch.zeros_like(scores).index_copy_(0, best, lead)


@register_outcome_estimator("rloo", "rloo_vectorized")
def compute_rloo_outcome_advantage(scores: torch.Tensor, groups: Groups) -> torch.Tensor:
    """REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740): A = R - mean of the others
    = n / (n - 1) (R - mean of group); a group of one keeps its score.
    """
    leave_one_out = groups.row_size / (groups.row_size - 1).clamp(min=1)
    return (scores - groups.row_mean(scores)) * leave_one_out


@register_outcome_estimator("opo")
def compute_opo_outcome_advantage(scores: torch.Tensor, groups: Groups, *, lengths: torch.Tensor) -> torch.Tensor:
    """OPO (https://arxiv.org/abs/2505.23585): A = R - sum(length R) / sum(length) over the group; a group of one keeps
    its score.
    """
    # A group whose responses are all masked out has no length; its tokens carry no advantage either way.
    baseline = (groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1.0)).to(scores.dtype)
    return scores - torch.where(groups.row_size > 1, baseline[groups.number], 0.0)


@register_outcome_estimator("gpg")
def compute_gpg_outcome_advantage(scores: torch.Tensor, groups: Groups, *, f_norm: float = 1.0) -> torch.Tensor:
    """GPG (https://arxiv.org/abs/2504.02546): A = alpha (R - mean of group) / f_norm, alpha = rows / rows with a score
    other than 0.
    """
    alpha = scores.shape[0] / torch.count_nonzero(scores).clamp(min=1)
    return alpha * (scores - groups.row_mean(scores)) / f_norm


@register_outcome_estimator("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    scores: torch.Tensor, groups: Groups, *, lengths: torch.Tensor
) -> torch.Tensor:
    """REINFORCE++ with the group mean as baseline (https://arxiv.org/abs/2501.03262): A = whiten(R - mean of group),
    mean and variance taken over all kept tokens of the batch.
    """
    centered = scores - groups.row_mean(scores)
    # All tokens of a row are equal, so moments over tokens are moments over rows weighted by length.
    lengths = lengths.double()
    num_tokens = lengths.sum()
    mean = (lengths * centered).sum() / num_tokens.clamp(min=1)
    variance = (lengths * (centered - mean).square()).sum() / (num_tokens - 1).clamp(min=1)
    return ((centered - mean) * torch.rsqrt(variance + 1e-8)).to(scores.dtype)
