"""Balancing: every index once, sums close, orders restored, fast."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.parallel.balance import (
    get_seqlen_balanced_partitions,
    inverse_order,
)
from dovetail.parallel.micro_batches import plan_by_size, plan_by_tokens

pytestmark = pytest.mark.unit

LENGTHS = st.lists(st.integers(1, 2048), min_size=1, max_size=96)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_partitions_hold_every_index_once_and_none_is_empty(lengths: list[int], k: int) -> None:
    k = min(k, len(lengths))
    parts = get_seqlen_balanced_partitions(lengths, k)
    assert len(parts) == k
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_equal_size_partitions_have_equal_counts_and_spread_below_the_longest(lengths: list[int], k: int) -> None:
    lengths = lengths * k
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size=True)
    assert {len(part) for part in parts} == {len(lengths) // k}
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_spread_never_exceeds_the_longest_sequence(lengths: list[int], k: int) -> None:
    k = min(k, len(lengths))
    sums = [sum(lengths[i] for i in part) for part in get_seqlen_balanced_partitions(lengths, k)]
    assert max(sums) - min(sums) <= max(lengths)


def test_differencing_finds_the_known_split_of_the_textbook_case() -> None:
    # 8,7,6,5,4: differencing gives a difference of 2 (16 against 14).
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_zero_lengths_still_leave_no_part_empty() -> None:
    assert all(get_seqlen_balanced_partitions([0, 0, 5, 0], 4))


@pytest.mark.parametrize("k", [8, 256])
@pytest.mark.parametrize("equal_size", [False, True])
def test_sixteen_thousand_sequences_balance_within_a_thousandth(k: int, equal_size: bool) -> None:
    lengths = np.random.default_rng(0).integers(64, 8192, 16384).tolist()
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size)
    sums = np.array([sum(lengths[i] for i in part) for part in parts])
    assert (sums.max() - sums.min()) / sums.mean() < 1e-3


def test_too_many_parts_and_uneven_counts_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="at most 2"):
        get_seqlen_balanced_partitions([1, 2], 3)
    with pytest.raises(ValueError, match="multiple of 2"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


@given(st.permutations(range(20)))
def test_inverse_order_undoes_an_order(order: list[int]) -> None:
    items = torch.arange(20) * 3
    assert torch.equal(items[torch.tensor(order)][torch.tensor(inverse_order(order))], items)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 4096))
def test_token_plan_keeps_its_budget_and_restores_the_order(lengths: list[int], extra: int) -> None:
    budget = max(lengths) + extra
    plan = plan_by_tokens(lengths, budget)
    assert all(sum(lengths[i] for i in part) <= budget for part in plan.partitions)
    column = torch.arange(len(lengths) * 2).view(-1, 2)
    assert torch.equal(plan.restore([column[part] for part in plan.partitions]), column)


def test_token_plan_refuses_a_sequence_above_the_budget() -> None:
    with pytest.raises(ValueError, match="at least 30"):
        plan_by_tokens([5, 30], 20)


def test_size_plan_keeps_batch_order() -> None:
    assert plan_by_size(5, 2).partitions == [[0, 1], [2, 3], [4]]


def test_rows_that_belong_together_stay_together_where_the_budget_allows_it() -> None:
    lengths = [10, 20, 10, 20, 10, 20, 50, 50]
    together = [[0, 2, 4], [1, 3, 5], [6, 7]]  # of 30, 60 and 100 tokens
    plan = plan_by_tokens(lengths, 90, together=together)
    assert sorted(plan.order) == list(range(8))
    assert max(sum(lengths[row] for row in part) for part in plan.partitions) <= 90
    for group in together[:2]:
        part = next(part for part in plan.partitions if group[0] in part)
        place = part.index(group[0])
        assert part[place : place + 3] == group
    # More micro-batches than groups: the groups are cut.
    cut = plan_by_tokens(lengths, 90, together=together, min_num_micro_batch=7)
    assert len(cut) == 7
    assert sorted(cut.order) == list(range(8))
