"""Cut a rank's rows into mini-batches, one optimizer step each. Knows nothing of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from dovetail.config.actor import ActorConfig
from dovetail.config.critic import CriticConfig
from dovetail.protocol import DataProto

MINI_BATCH_ROWS = "mini_batch_rows"
"""Key of meta_info: how many rows a rank has of each mini-batch, where trajectories are unequal numbers of rows."""
OWN_OLD_LOG_PROBS = "own_old_log_probs"
"""Key of meta_info: the rows of the first mini-batch have no old log-probs but those of their own update."""


def mini_batches(data: DataProto, rows: int, *, shuffle_seed: int | None = None) -> Iterator[DataProto]:
    """Consecutive rows, `rows` each; shuffled first when a seed is given.

    The driver lays rows out so that the i-th slices of all ranks form the i-th mini-batch. A shuffle is the same on
    every rank (same seed, same number of rows), so it keeps slices of equal index together. Mini-batches of different
    sizes, which the driver says, hold whole groups and are shuffled as they are.
    """
    sizes: Sequence[int] | None = data.meta_info.get(MINI_BATCH_ROWS)
    if sizes is not None:
        parts = [data.slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        order = range(len(parts)) if shuffle_seed is None else _shuffled(len(parts), shuffle_seed)
        yield from (parts[number] for number in order)
        return
    if len(data) % rows:
        raise ValueError(
            f"{len(data)} rows on this rank do not make whole mini-batches of {rows}; choose data.train_batch_size as "
            "a multiple of ppo_mini_batch_size."
        )
    if shuffle_seed is not None:
        data = data.select_idxs(_shuffled(len(data), shuffle_seed))
    for start in range(0, len(data), rows):
        yield data.slice(start, start + rows)


def optimizer_steps(data: DataProto, rows: int, config: ActorConfig | CriticConfig, *, seed: int) -> list[DataProto]:
    """The mini-batches of all epochs, in the order of their steps."""
    seeds = [seed * 1009 + epoch if config.shuffle else None for epoch in range(config.ppo_epochs)]
    return [part for shuffle_seed in seeds for part in mini_batches(data, rows, shuffle_seed=shuffle_seed)]


def makes_one_step(data: DataProto, rows: int) -> bool:
    """Whether the rows are a single mini-batch."""
    sizes = data.meta_info.get(MINI_BATCH_ROWS)
    return len(data) <= rows if sizes is None else len(sizes) == 1


def _shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
