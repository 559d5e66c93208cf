"""Old log-probs in two parts: of the first mini-batch from its update, of the other rows from the pass before it.

The first optimizer step has the weights of that pass, so its own log-probs are the old ones, and the pass leaves its
rows out (`DovetailConfig.skips_first_mini_batch`). Speaks to no worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.protocol import DataProto
from dovetail.workers.mini_batches import OWN_OLD_LOG_PROBS


@dataclass(frozen=True)
class PartialLogProbs:
    """`columns` are the pass's, as long as the batch. The rows of the first mini-batch hold NaN: the update drops them
    unread, files leave them out, and what reads one by mistake fails, instead of training on an invented number."""

    first: Tensor
    """Bool `[rows]`: those of the first mini-batch."""
    columns: DataProto

    def completed(self, update: DataProto) -> DataProto:
        """`old_log_probs` of all rows. An update gives those of the first mini-batch rank by rank, as a batch does."""
        old_log_probs = self.columns.tensors["old_log_probs"].clone()
        old_log_probs[self.first] = update.tensors["old_log_probs"]
        return DataProto.from_dict({"old_log_probs": old_log_probs})


def first_mini_batch(num_rows: int, num_ranks: int, mini_batch_rows: int) -> Tensor:
    """Its rows in a batch that is arranged for these ranks, in mini-batches of `mini_batch_rows` over all of them."""
    return torch.arange(num_rows) % (num_rows // num_ranks) < mini_batch_rows // num_ranks


def score_others(batch: DataProto, first: Tensor, score: Callable[[DataProto], DataProto]) -> PartialLogProbs:
    """Call `score` with the rows that are not in the first mini-batch."""
    columns = {}
    for name, values in score(batch.select_idxs(~first)).tensors.items():
        columns[name] = values.new_full((len(batch), values.shape[1]), torch.nan)
        columns[name][~first] = values
    return PartialLogProbs(first, DataProto.from_dict(columns, meta_info={OWN_OLD_LOG_PROBS: True}))
