"""Supervised fine-tuning: cross-entropy of the tokens that the assistant wrote, the mean over all of the batch."""

from __future__ import annotations

from torch import Tensor

from dovetail.algorithms.masked import at_least_float32, masked_sum
from dovetail.algorithms.offline.registry import LOSS_MASK, Columns, OfflineLoss, Result, Totals


def sft_loss() -> OfflineLoss:
    """-log p of each trained token, divided by their number in the whole batch."""

    def share(log_probs: Tensor, columns: Columns, totals: Totals) -> Result:
        loss = -masked_sum(at_least_float32(log_probs), columns[LOSS_MASK]) / max(totals["tokens"], 1)
        return loss, {}

    def count(columns: Columns) -> dict[str, float]:
        return {"tokens": float(columns[LOSS_MASK].sum())}

    return OfflineLoss(share, count, (LOSS_MASK,))
