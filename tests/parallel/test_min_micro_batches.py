"""`min_num_micro_batch`: at least so many micro-batches by tokens, each row once, none beyond the budget."""

from __future__ import annotations

import random

import pytest

from dovetail.parallel.micro_batches import plan_by_tokens

pytestmark = pytest.mark.unit


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


def test_more_than_there_are_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="min_num_micro_batch=3 asks for more micro-batches than there are sequences"):
        plan_by_tokens([4, 4], 100, min_num_micro_batch=3)
