"""Micro-batches by tokens: at least so many as asked, none beyond the budget, on every rank the same number."""

from __future__ import annotations

import random

import pytest

from dovetail.parallel.micro_batches import plan_by_tokens
from tests.ranks import run_ranks


def _plan_on_rank(rank: int, world_size: int) -> tuple[int, list[int], int]:
    import torch.distributed as dist

    lengths = [[64, 64, 64, 64], [10, 10, 10, 10]][rank]
    plan = plan_by_tokens(lengths, 64, group=dist.group.WORLD)
    return len(plan), sorted(plan.order), max(sum(lengths[i] for i in part) for part in plan.partitions)


@pytest.mark.distributed
def test_all_ranks_plan_the_same_number_of_micro_batches() -> None:
    assert run_ranks(_plan_on_rank, 2) == [(4, [0, 1, 2, 3], 64), (4, [0, 1, 2, 3], 10)]


def _too_few_rows(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    lengths = [[64, 64, 64], [10, 10]][rank]
    with pytest.raises(ValueError, match="one rank needs 3 micro-batches but another has only 2 sequences"):
        plan_by_tokens(lengths, 64, group=dist.group.WORLD)


@pytest.mark.distributed
def test_every_rank_refuses_a_plan_one_of_them_cannot_fill() -> None:
    run_ranks(_too_few_rows, 2)


@pytest.mark.unit
@pytest.mark.parametrize("least", [1, 2, 3, 5, 12])
def test_there_are_at_least_so_many(least: int) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 50) for _ in range(12)]
        plan = plan_by_tokens(lengths, 200, min_num_micro_batch=least)
        assert len(plan) >= least
        assert sorted(plan.order) == list(range(12))
        assert all(part and sum(lengths[row] for row in part) <= 200 for part in plan.partitions)
        assert len(plan) == max(least, len(plan_by_tokens(lengths, 200)))


@pytest.mark.unit
def test_more_than_there_are_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="min_num_micro_batch=3 asks for more micro-batches than there are sequences"):
        plan_by_tokens([4, 4], 100, min_num_micro_batch=3)
