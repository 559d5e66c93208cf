"""Lay the rows of a batch out for data-parallel ranks. Knows lengths and counts only.

Ranks get consecutive rows and cut them into mini-batches by position. So the layout decides which rows train together:
here the i-th mini-batch holds the same rows whatever the number of ranks, and inside it every rank gets the same number
of sequences and nearly the same number of tokens. Where rows do not divide, ranks get padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.parallel.balance import get_seqlen_balanced_partitions

PADDING = -1


@dataclass(frozen=True)
class RankLayout:
    """`rows` are numbers of rows in the order in which ranks take them, or `PADDING`; `mini_batch_rows[i]` is how many
    each rank has of mini-batch i."""

    rows: list[int]
    mini_batch_rows: list[int]

    @property
    def order(self) -> list[int]:
        """The rows without padding."""
        return [row for row in self.rows if row != PADDING]


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
    return lay_out(lengths, num_ranks, [mini_batch_rows] * (num_rows // mini_batch_rows), balance=balance).rows


def lay_out(lengths: Sequence[int], num_ranks: int, sizes: Sequence[int], *, balance: bool = True) -> RankLayout:
    """Rows for mini-batches of consecutive rows, `sizes[i]` in the i-th. Padding counts as the shortest sequence."""
    shortest = min(lengths, default=0)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    start = 0
    for size in sizes:
        block = [*lengths[start : start + size], *([shortest] * (-size % num_ranks))]
        per_rank = len(block) // num_ranks
        if balance:
            parts = get_seqlen_balanced_partitions(block, num_ranks, equal_size=True)
        else:
            parts = [list(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(num_ranks)]
        for share, part in zip(shares, parts, strict=True):
            share.extend(start + index if index < size else PADDING for index in sorted(part))
        start += size
    return RankLayout([row for share in shares for row in share], [-(-size // num_ranks) for size in sizes])


def group_sizes(uids: Sequence[object], groups: int) -> list[int]:
    """Rows of mini-batches of `groups` whole groups each; the rows of a group stand together."""
    rows = list(Counter(map(str, uids)).values())
    return [sum(rows[start : start + groups]) for start in range(0, len(rows), groups)]


def imbalance(lengths: Sequence[int], num_ranks: int) -> dict[str, float]:
    """How many tokens ranks get: fewest, most, and their difference. Where rows do not divide, the last has fewer."""
    size = -(-len(lengths) // num_ranks)
    tokens = [sum(lengths[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
    return {
        "global_seqlen/min": float(min(tokens)),
        "global_seqlen/max": float(max(tokens)),
        "global_seqlen/minmax_diff": float(max(tokens) - min(tokens)),
        "global_seqlen/mean": sum(tokens) / num_ranks,
    }
