"""Micro-batch plans of several ranks: every rank makes the same number of forwards and backwards."""

from __future__ import annotations

import pytest

from dovetail.parallel.micro_batches import plan_by_tokens
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _plan_on_rank(rank: int, world_size: int) -> tuple[int, list[int], int]:
    import torch.distributed as dist

    lengths = [[64, 64, 64, 64], [10, 10, 10, 10]][rank]
    plan = plan_by_tokens(lengths, 64, group=dist.group.WORLD)
    return len(plan), sorted(plan.order), max(sum(lengths[i] for i in part) for part in plan.partitions)


def test_all_ranks_plan_the_same_number_of_micro_batches() -> None:
    assert run_ranks(_plan_on_rank, 2) == [(4, [0, 1, 2, 3], 64), (4, [0, 1, 2, 3], 10)]


def _too_few_rows(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    lengths = [[64, 64, 64], [10, 10]][rank]
    with pytest.raises(ValueError, match="one rank needs 3 micro-batches but another has only 2 sequences"):
        plan_by_tokens(lengths, 64, group=dist.group.WORLD)


def test_every_rank_refuses_a_plan_one_of_them_cannot_fill() -> None:
    run_ranks(_too_few_rows, 2)
