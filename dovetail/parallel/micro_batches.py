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

from dovetail.parallel.balance import get_seqlen_balanced_partitions, inverse_order, sequence_workload


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
    hidden_size: int | None = None,
    device: torch.device | str = "cpu",
    min_num_micro_batch: int = 1,
) -> MicroBatchPlan:
    """As few micro-batches as fit into `max_tokens` tokens each, of nearly equal work; at least `min_num_micro_batch`.

    The budget is a promise: no micro-batch exceeds it. `hidden_size` balances FLOPs (attention is quadratic) instead of
    tokens. `group` holds the ranks that must agree on the number; the largest need wins.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {max_tokens} tokens; "
            f"raise the token budget to at least {longest}."
        )
    partitions = _fewest_that_fit(lengths, max_tokens, hidden_size)
    if len(partitions) < min_num_micro_batch:
        if min_num_micro_batch > len(lengths):
            raise ValueError(
                f"min_num_micro_batch={min_num_micro_batch} asks for more micro-batches than there are sequences "
                f"({len(lengths)}); use {len(lengths)} or less."
            )
        partitions = _split_into(lengths, partitions, min_num_micro_batch, max_tokens, hidden_size)
    if group is not None:
        agreed = _agree_on_count(len(partitions), len(lengths), group, device)
        if agreed > len(partitions):
            partitions = _split_into(lengths, partitions, agreed, max_tokens, hidden_size)
    work = sequence_workload(lengths, hidden_size)
    # Largest first: an out-of-memory error comes at once, and the allocator's first blocks serve all later ones.
    return MicroBatchPlan(sorted(partitions, key=lambda part: (-float(work[part].sum()), part[0])))


def plan_by_size(num_rows: int, rows_per_micro_batch: int) -> MicroBatchPlan:
    """Consecutive rows, `rows_per_micro_batch` each; the last one may be smaller."""
    if rows_per_micro_batch < 1:
        raise ValueError(f"micro_batch_size={rows_per_micro_batch} must be at least 1.")
    rows = list(range(num_rows))
    return MicroBatchPlan([rows[i : i + rows_per_micro_batch] for i in range(0, num_rows, rows_per_micro_batch)])


def _fewest_that_fit(lengths: Sequence[int], max_tokens: int, hidden_size: int | None) -> list[list[int]]:
    work = sequence_workload(lengths, hidden_size)
    first = max(1, math.ceil(sum(lengths) / max_tokens))
    # Differencing rarely needs more than one part above the lower bound; worst-fit always fits and ends the search.
    packed = _worst_fit_decreasing(lengths, max_tokens)
    for count in range(first, min(len(packed), first + 8)):
        partitions = get_seqlen_balanced_partitions(work.tolist(), count)
        if _fits(lengths, partitions, max_tokens):
            return partitions
    partitions = get_seqlen_balanced_partitions(work.tolist(), len(packed))
    return partitions if _fits(lengths, partitions, max_tokens) else packed


def _split_into(
    lengths: Sequence[int], partitions: list[list[int]], count: int, max_tokens: int, hidden_size: int | None
) -> list[list[int]]:
    balanced = get_seqlen_balanced_partitions(sequence_workload(lengths, hidden_size).tolist(), count)
    if _fits(lengths, balanced, max_tokens):
        return balanced
    parts = list(partitions)
    while len(parts) < count:
        largest = max((p for p in parts if len(p) > 1), key=lambda p: sum(lengths[i] for i in p))
        parts.remove(largest)
        parts.extend([largest[: len(largest) // 2], largest[len(largest) // 2 :]])
    return parts


def _fits(lengths: Sequence[int], partitions: Sequence[Sequence[int]], max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in part) <= max_tokens for part in partitions)


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
