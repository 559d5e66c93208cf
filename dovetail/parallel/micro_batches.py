"""Plan micro-batches: which rows go together, and how to put their results back in order.

A plan is indices only. With a process group all ranks get the same number of micro-batches, because every forward and
backward is a collective under FSDP. Knows nothing of losses or models.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.parallel.balance import get_seqlen_balanced_partitions, inverse_order


@dataclass(frozen=True)
class MicroBatchPlan:
    """Row indices of each micro-batch; every row of the batch occurs once."""

    partitions: list[list[int]]

    def __len__(self) -> int:
        return len(self.partitions)

    @property
    def order(self) -> list[int]:
        return [index for part in self.partitions for index in part]

    @property
    def inverse(self) -> list[int]:
        return inverse_order(self.order)

    def restore(self, outputs: Sequence[Tensor]) -> Tensor:
        """Join per-micro-batch results (rows first) in the batch's own order."""
        joined = torch.cat(list(outputs), dim=0)
        return joined[torch.tensor(self.inverse, device=joined.device)]


def plan_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    min_num_micro_batch: int = 1,
    together: Sequence[Sequence[int]] | None = None,
) -> MicroBatchPlan:
    """As few micro-batches as fit into `max_tokens` tokens each, nearly equal; at least `min_num_micro_batch`.

    The budget is a promise: no micro-batch exceeds it. `group` holds the ranks that must agree on the number; the
    largest need wins. Rows listed in `together` come into one micro-batch, next to each other, where budget and numbers
    allow it.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {max_tokens} tokens; "
            f"raise the token budget to at least {longest}."
        )
    rows = _Units.of([[row] for row in range(len(lengths))], lengths)
    units = rows if together is None else _Units.of(_that_fit(together, lengths, max_tokens), lengths)
    partitions = units.fewest_that_fit(max_tokens)
    count = len(partitions)
    if count < min_num_micro_batch:
        if min_num_micro_batch > len(lengths):
            raise ValueError(
                f"min_num_micro_batch={min_num_micro_batch} asks for more micro-batches than there are sequences "
                f"({len(lengths)}); use {len(lengths)} or less."
            )
        count = min_num_micro_batch
    if group is not None:
        count = _agree_on_count(count, len(lengths), group, device)
    if count > len(partitions):
        few = count > len(units.rows)  # there are not so many units: cut them up
        parts = rows.fewest_that_fit(max_tokens) if few else partitions
        partitions = (rows if few else units).split_into(parts, count, max_tokens)
    # Largest first: an out-of-memory error comes at once, and the allocator's first blocks serve all later ones.
    return MicroBatchPlan(sorted(partitions, key=lambda part: (-sum(lengths[row] for row in part), part[0])))


def plan_by_size(num_rows: int, rows_per_micro_batch: int) -> MicroBatchPlan:
    """Consecutive rows, `rows_per_micro_batch` each; the last one may be smaller."""
    if rows_per_micro_batch < 1:
        raise ValueError(f"micro_batch_size={rows_per_micro_batch} must be at least 1.")
    rows = list(range(num_rows))
    return MicroBatchPlan([rows[i : i + rows_per_micro_batch] for i in range(0, num_rows, rows_per_micro_batch)])


@dataclass(frozen=True)
class _Units:
    """What is not cut: single rows, or rows that belong together."""

    rows: list[list[int]]
    lengths: Sequence[int]
    """Tokens of each row."""
    tokens: list[int]

    @classmethod
    def of(cls, rows: list[list[int]], lengths: Sequence[int]) -> _Units:
        return cls(rows, lengths, [sum(lengths[row] for row in unit) for unit in rows])

    def fewest_that_fit(self, max_tokens: int) -> list[list[int]]:
        first = max(1, math.ceil(sum(self.tokens) / max_tokens))
        # Differencing rarely needs more than one part above the lower bound; worst-fit always fits and ends the search.
        packed = _worst_fit_decreasing(self.tokens, max_tokens)
        for count in range(first, min(len(packed), first + 8)):
            if balanced := self._balanced(count, max_tokens):
                return balanced
        return self._balanced(len(packed), max_tokens) or self._rows_of(packed)

    def split_into(self, partitions: list[list[int]], count: int, max_tokens: int) -> list[list[int]]:
        if balanced := self._balanced(count, max_tokens):
            return balanced
        parts = list(partitions)
        while len(parts) < count:
            largest = max((part for part in parts if len(part) > 1), key=self._num_tokens)
            parts.remove(largest)
            parts.extend([largest[: len(largest) // 2], largest[len(largest) // 2 :]])
        return parts

    def _num_tokens(self, part: list[int]) -> int:
        return sum(self.lengths[row] for row in part)

    def _balanced(self, count: int, max_tokens: int) -> list[list[int]] | None:
        parts = get_seqlen_balanced_partitions(self.tokens, count)
        fits = all(sum(self.tokens[unit] for unit in part) <= max_tokens for part in parts)
        return self._rows_of(parts) if fits else None

    def _rows_of(self, parts: list[list[int]]) -> list[list[int]]:
        return [[row for unit in part for row in self.rows[unit]] for part in parts]


def _that_fit(together: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The rows of each group that fit into one micro-batch, in order; the rest of them form another one."""
    units: list[list[int]] = []
    for group in together:
        units.append([])
        tokens = 0
        for row in group:
            if tokens + lengths[row] > max_tokens and units[-1]:
                units.append([])
                tokens = 0
            units[-1].append(row)
            tokens += lengths[row]
    return units


def _worst_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sequence, longest first, into the emptiest part that is open, or open another."""
    parts: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (-room left, part)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if free and -free[0][0] >= lengths[index]:
            room, part = heapq.heappop(free)
            parts[part].append(index)
            heapq.heappush(free, (room + lengths[index], part))
        else:
            parts.append([index])
            heapq.heappush(free, (lengths[index] - max_tokens, len(parts) - 1))
    return [sorted(part) for part in parts]


def _agree_on_count(count: int, num_rows: int, group: dist.ProcessGroup, device: torch.device | str) -> int:
    numbers = torch.tensor([count, -num_rows], device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    agreed, fewest_rows = int(numbers[0]), -int(numbers[1])
    if agreed > fewest_rows:
        raise ValueError(
            f"one rank needs {agreed} micro-batches but another has only {fewest_rows} sequences; "
            "balance the sequences over the data-parallel ranks or raise the token budget."
        )
    return agreed
