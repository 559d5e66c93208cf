"""DPO (Rafailov et al. 2023): the log-ratio to a reference policy as an implicit reward."""

from __future__ import annotations

from torch import Tensor

from dovetail.algorithms.offline.pairs import logistic_loss, pair_metrics


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    num_pairs: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss, and of metrics, from summed log-probs of responses, one pair a row.

    -log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)). `label_smoothing` is the share of pairs that are
    taken to be labelled the wrong way round (conservative DPO).
    """
    rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    total = num_pairs or len(chosen)
    loss = logistic_loss(rewards[0] - rewards[1], label_smoothing).sum() / total
    return loss, pair_metrics(*rewards, chosen, rejected, total)
