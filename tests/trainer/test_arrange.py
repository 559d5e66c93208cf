"""Which rows train together must not depend on how many ranks there are."""

from __future__ import annotations

import random

import pytest

from dovetail.trainer.arrange import arrange_rows, imbalance

pytestmark = pytest.mark.unit


def mini_batches(order: list[int], num_ranks: int, mini_batch_rows: int) -> list[list[list[int]]]:
    """`[mini-batch][rank]`: the rows that ranks take when they get consecutive shares and cut them by position."""
    share, part = len(order) // num_ranks, mini_batch_rows // num_ranks
    shares = [order[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return [[rows[start : start + part] for rows in shares] for start in range(0, share, part)]


def lengths_of(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 500) for _ in range(count)]


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("mini_batch_rows", [8, 16, 48])
def test_mini_batches_hold_the_same_rows_whatever_the_number_of_ranks(
    mini_batch_rows: int, num_ranks: int, balance: bool
) -> None:
    for seed in range(5):
        order = arrange_rows(lengths_of(48, seed), num_ranks, mini_batch_rows, balance=balance)
        assert sorted(order) == list(range(48))
        for number, parts in enumerate(mini_batches(order, num_ranks, mini_batch_rows)):
            assert all(len(part) == mini_batch_rows // num_ranks for part in parts)
            rows = sorted(row for part in parts for row in part)
            assert rows == list(range(number * mini_batch_rows, (number + 1) * mini_batch_rows))


def test_one_rank_keeps_the_order() -> None:
    assert arrange_rows([5, 1, 9, 2], 1, 2) == [0, 1, 2, 3]


def test_balancing_gives_ranks_nearly_equal_tokens() -> None:
    lengths = lengths_of(64, 0)
    gap = {}
    for balance in (True, False):
        order = arrange_rows(lengths, 4, 32, balance=balance)
        gap[balance] = imbalance([lengths[row] for row in order], 4)["global_seqlen/minmax_diff"]
    assert gap[True] <= 0.02 * sum(lengths) / 4
    assert gap[True] < gap[False] / 10


def test_imbalance_counts_tokens_of_each_rank() -> None:
    assert imbalance([1, 2, 3, 10], 2) == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 13.0,
        "global_seqlen/minmax_diff": 10.0,
        "global_seqlen/mean": 8.0,
    }
    # Rows of agents need not divide: none is left out.
    assert imbalance([1, 2, 3, 4, 5], 2)["global_seqlen/mean"] == 7.5


def test_batches_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="10 sequences do not make whole mini-batches of 4"):
        arrange_rows([1] * 10, 1, 4)
    with pytest.raises(ValueError, match="a mini-batch of 4 sequences does not divide over 3"):
        arrange_rows([1] * 8, 3, 4)
