"""Which draws may start and which groups a step trains on, without any engine, in any order in which they finish."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.trainer.pace import OnStale, Pace, choose


@dataclass
class Drawn:
    number: int
    version: int
    newest: int = 0


def numbers(*draws: tuple[int, int]) -> list[Drawn]:
    return [Drawn(number, version, version) for number, version in draws]


@pytest.mark.parametrize(("staleness", "chunks"), [(0, 1), (1, 2), (4, 5)])
def test_as_many_chunks_start_as_batches_may_be_ahead(staleness: int, chunks: int) -> None:
    pace, num_open = Pace(staleness), 0
    while pace.may_start(num_open, batches_left=100):
        num_open += 1
    assert num_open == chunks
    pace.num_taken += 1
    num_open -= 1
    assert not pace.may_start(num_open, 100), "taking a batch is not an update"
    pace.num_taken_at_update = pace.num_taken
    assert pace.may_start(num_open, 100)


def test_nothing_starts_that_no_step_would_use() -> None:
    pace = Pace(4)
    assert [pace.may_start(num_open, batches_left=2) for num_open in range(4)] == [True, True, False, False]


def test_with_dynamic_sampling_as_many_chunks_start_as_fill_the_batches_that_may_be_ahead() -> None:
    pace = Pace(1)
    assert pace.may_start(9, 100, num_filled=1.9), "a chunk of which little has a signal fills less than a batch"
    assert not pace.may_start(0, 100, num_filled=2.0)
    assert not pace.may_start(9, 1, num_filled=1.0)


@pytest.mark.parametrize(("num_open", "num_filled", "starts"), [(0, 0.9, True), (1, 0.3, False), (0, 1.0, False)])
def test_without_staleness_dynamic_sampling_starts_only_what_the_step_surely_needs(
    num_open: int, num_filled: float, starts: bool
) -> None:
    assert Pace(0).may_start(num_open, 100, num_filled=num_filled) is starts


def test_a_step_of_dynamic_sampling_waits_only_for_what_is_due_in_it() -> None:
    # At step 2 with a bound of 1: three draws of version 0 are due, and a step chooses more than once.
    def must_finish(step: int, *, is_filtered: bool) -> list[int]:
        ready, running = numbers((0, 0)), numbers((1, 0), (2, 0), (3, 0))
        kind = {"order": "finish", "on_stale": "wait", "is_filtered": is_filtered}
        settings: Any = {"count": 1, "step": step, "max_staleness": 1, **kind}
        return list(choose(ready, running, **settings).must_finish)

    assert must_finish(1, is_filtered=True) == []
    assert must_finish(1, is_filtered=False) == [1, 2]
    assert must_finish(2, is_filtered=True) == must_finish(2, is_filtered=False) == [1, 2, 3]


def test_a_bound_that_no_run_reaches_takes_no_longer_than_another() -> None:
    settings: Any = {"count": 2, "step": 1, "order": "finish", "on_stale": "wait"}
    choice = choose(numbers((0, 0), (1, 0)), numbers((2, 0), (3, 0)), max_staleness=10**12, **settings)
    assert choice.chosen == [0, 1]


def test_the_order_of_draws_waits_for_exactly_the_next_ones() -> None:
    ready, running = numbers((1, 0), (2, 0), (4, 0)), numbers((0, 0), (3, 0))
    choice = choose(ready, running, count=2, step=1, max_staleness=1, order="draw", on_stale="wait")
    assert choice.chosen is None
    assert choice.must_finish == [0]
    choice = choose(
        [*ready, *running[:1]], running[1:], count=2, step=1, max_staleness=1, order="draw", on_stale="wait"
    )
    assert choice.chosen == [0, 1]


@pytest.mark.parametrize(
    ("on_stale", "chosen", "must_finish", "too_old"),
    [("wait", None, [0], []), ("drop", None, [], [0, 1]), ("mask", None, [], [1])],
)
def test_a_group_beyond_the_bound(
    on_stale: OnStale, chosen: object, must_finish: list[int], too_old: list[int]
) -> None:
    # At step 4 with a bound of 1, version 2 is the oldest that may be trained on.
    ready, running = [Drawn(1, 1, 1), Drawn(2, 1, 3), Drawn(3, 3, 3)], [Drawn(0, 1)]
    if on_stale == "drop":
        ready[1] = Drawn(2, 2, 3)
    choice = choose(ready, running, count=3, step=4, max_staleness=1, order="finish", on_stale=on_stale)
    assert (choice.chosen, list(choice.must_finish), list(choice.too_old)) == (chosen, must_finish, too_old)


@pytest.mark.parametrize("seed", range(200))
def test_waiting_for_groups_at_the_bound_keeps_it_however_they_finish(seed: int) -> None:
    """A scheduler in small: groups finish in random order, the trainer waits only for those it must."""
    rng = random.Random(seed)
    count, bound, steps = rng.randint(1, 4), rng.randint(0, 3), 30
    pace, ready, running = Pace(bound), list[Drawn](), list[Drawn]()
    trained: dict[int, int] = {}
    for step in range(1, steps + 1):
        pace.num_taken_at_update = pace.num_taken
        while pace.may_start((len(ready) + len(running)) // count, steps - (step - 1)):
            first = len(trained) + len(ready) + len(running)
            running += [Drawn(first + i, step - 1, step - 1) for i in range(count)]
        while True:
            choice = choose(
                ready, running, count=count, step=step, max_staleness=bound, order="finish", on_stale="wait"
            )
            if choice.chosen is not None:
                break
            done = rng.choice(running)
            running.remove(done)
            ready.append(done)
        for draw in [draw for draw in ready if draw.number in choice.chosen]:
            assert (step - 1) - draw.version <= bound
            assert draw.number not in trained
            trained[draw.number] = step
            ready.remove(draw)
        pace.num_taken += 1
    assert sorted(trained) == list(range(steps * count))
