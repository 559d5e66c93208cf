"""Cut a rank's rows into mini-batches, one optimizer step each. Knows nothing of losses."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.protocol import DataProto


def mini_batches(data: DataProto, rows: int, *, shuffle_seed: int | None = None) -> Iterator[DataProto]:
    """Consecutive rows, `rows` each; shuffled first when a seed is given.

    The driver lays rows out so that the i-th slices of all ranks form the i-th mini-batch. A shuffle is the same on
    every rank (same seed, same number of rows), so it keeps slices of equal index together.
    """
    if len(data) % rows:
        raise ValueError(
            f"{len(data)} rows on this rank do not make whole mini-batches of {rows}; choose data.train_batch_size as "
            "a multiple of ppo_mini_batch_size."
        )
    if shuffle_seed is not None:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(shuffle_seed))
        data = data.select_idxs(order)
    for start in range(0, len(data), rows):
        yield data.slice(start, start + rows)
