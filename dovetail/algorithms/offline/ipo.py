"""IPO (Azar et al. 2023): the difference of log-ratios is pulled to 1 / (2 beta), not to infinity."""

from __future__ import annotations

from torch import Tensor

from dovetail.algorithms.offline.pairs import pair_metrics


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    num_pairs: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the loss, and of metrics, from summed log-probs of responses and their lengths in tokens.

    Log-ratios are averaged over tokens, as in the authors' experiments: sums would make the squared loss grow with
    the length of responses.
    """
    ratios = chosen - ref_chosen, rejected - ref_rejected
    difference = ratios[0] / chosen_lengths.clamp(min=1) - ratios[1] / rejected_lengths.clamp(min=1)
    total = num_pairs or len(chosen)
    loss = (difference - 1 / (2 * beta)).square().sum() / total
    return loss, pair_metrics(beta * ratios[0], beta * ratios[1], chosen, rejected, total)
