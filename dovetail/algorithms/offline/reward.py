"""Bradley-Terry loss of a reward model, with a margin for each pair and scores pulled to a mean of 0."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    *,
    center_coefficient: float = 0.0,
    num_pairs: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss, and of metrics, from the scores of pairs.

    -log sigmoid(chosen - rejected - margin), plus `center_coefficient` times the squared sum of both scores: only
    their difference is learned otherwise, and any offset fits (Eisenstein et al. 2023).
    """
    total = num_pairs or len(chosen)
    difference = chosen - rejected
    wanted = difference if margin is None else difference - margin
    loss = -logsigmoid(wanted).sum() / total
    if center_coefficient:
        loss = loss + center_coefficient * (chosen + rejected).square().sum() / total
    return loss, {
        "accuracy": (difference > 0).float().sum() / total,
        "margin": difference.detach().sum() / total,
        "mean_reward": (chosen + rejected).detach().sum() / (2 * total),
    }
