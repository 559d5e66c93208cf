"""Lay the rows of a batch out for data-parallel ranks. Knows lengths and counts only.

Ranks get consecutive rows and cut them into mini-batches by position. So the layout decides which rows train together:
here the i-th mini-batch holds the same rows whatever the number of ranks, and inside it every rank gets the same number
of sequences and nearly the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.parallel.balance import get_seqlen_balanced_partitions


def arrange_rows(lengths: Sequence[int], num_ranks: int, mini_batch_rows: int, *, balance: bool = True) -> list[int]:
    """The new order of the rows. `mini_batch_rows` counts sequences of one mini-batch over all ranks."""
    num_rows = len(lengths)
    if num_rows % mini_batch_rows:
        raise ValueError(
            f"{num_rows} sequences do not make whole mini-batches of {mini_batch_rows}; make data.train_batch_size a "
            "multiple of ppo_mini_batch_size."
        )
    if mini_batch_rows % num_ranks:
        raise ValueError(
            f"a mini-batch of {mini_batch_rows} sequences does not divide over {num_ranks} data-parallel ranks; make "
            "ppo_mini_batch_size x rollout.n a multiple of it."
        )
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, num_rows, mini_batch_rows):
        block = lengths[start : start + mini_batch_rows]
        if balance:
            parts = get_seqlen_balanced_partitions(block, num_ranks, equal_size=True)
        else:
            size = mini_batch_rows // num_ranks
            parts = [list(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
        for share, part in zip(shares, parts, strict=True):
            share.extend(start + index for index in sorted(part))
    return [index for share in shares for index in share]


def imbalance(lengths: Sequence[int], num_ranks: int) -> dict[str, float]:
    """How many tokens ranks get: fewest, most, and their difference."""
    size = len(lengths) // num_ranks
    tokens = [sum(lengths[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
    return {
        "global_seqlen/min": float(min(tokens)),
        "global_seqlen/max": float(max(tokens)),
        "global_seqlen/minmax_diff": float(max(tokens) - min(tokens)),
        "global_seqlen/mean": sum(tokens) / num_ranks,
    }
