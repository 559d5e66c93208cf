"""SimPO (Meng et al. 2024): the mean log-prob of a response as its reward, with a margin and without a reference."""

from __future__ import annotations

from torch import Tensor

from dovetail.algorithms.offline.pairs import logistic_loss, pair_metrics


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    gamma: float,
    label_smoothing: float = 0.0,
    num_pairs: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss, and of metrics, from mean log-probs per token: -log sigmoid(beta * difference - gamma)."""
    rewards = beta * chosen, beta * rejected
    total = num_pairs or len(chosen)
    loss = logistic_loss(rewards[0] - rewards[1] - gamma, label_smoothing).sum() / total
    return loss, pair_metrics(*rewards, chosen, rejected, total)
