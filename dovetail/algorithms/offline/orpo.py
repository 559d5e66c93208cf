"""ORPO (Hong et al. 2024): cross-entropy on the chosen response plus an odds ratio; no reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dovetail.algorithms.offline.pairs import pair_metrics


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    *,
    beta: float,
    num_pairs: float | None = None,
    num_chosen_tokens: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss, and of metrics, from mean log-probs per token and the chosen responses' lengths.

    The cross-entropy is the mean over all chosen tokens of the batch, prompts left out.
    """
    total = num_pairs or len(chosen)
    nll = -(chosen * chosen_lengths).sum() / (num_chosen_tokens or chosen_lengths.sum().clamp(min=1))
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    log_odds_ratio = logsigmoid(log_odds).sum() / total
    loss = nll - beta * log_odds_ratio
    return loss, pair_metrics(beta * chosen, beta * rejected, chosen, rejected, total) | {
        "nll_loss": nll.detach(),
        "log_odds_ratio": log_odds_ratio.detach(),
        "log_odds_chosen": log_odds.detach().sum() / total,
    }


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends (Maechler 2012). Probabilities of 1 are held a little below it."""
    x = x.clamp(max=-1e-7)
    # The branch that is not taken gets a harmless value: its gradient would be NaN, and 0 * NaN is NaN.
    near = x > -0.6931471805599453
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -0.5))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
