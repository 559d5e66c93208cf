"""Coroutine functions: many calls at a time in one process, each with its own limit and its own failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from dovetail.rewards import pool as pools
from dovetail.rewards.errors import Failure
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.pool import KillablePool
from tests.rewards import async_functions, scoring_functions
from tests.rewards.test_pool import call

pytestmark = pytest.mark.unit


def spec(name: str) -> FunctionSpec:
    return FunctionSpec(async_functions.__file__, name)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., KillablePool]]:
    monkeypatch.setattr(pools, "GRACE_SECONDS", 1.0)
    made: list[KillablePool] = []

    def one(**options: Any) -> KillablePool:
        settings = {"num_workers": 1, "timeout_seconds": 60.0, "async_calls": 4} | options
        made.append(KillablePool([spec("judge")], **settings))
        return made[-1]

    yield one
    for pool in made:
        pool.close()


def outcomes(pool: KillablePool, *answers: str, ground_truth: Any = None) -> list[Any]:
    return [future.result(60) for future in [pool.submit(call(answer, ground_truth)) for answer in answers]]


def test_calls_wait_side_by_side_and_no_more_than_allowed(make: Callable[..., KillablePool]) -> None:
    pool = make(async_calls=3)
    assert pool.calls_each == 3
    # Each ends when three are there at once: one at a time would never end.
    met = outcomes(pool, *["meet"] * 6, ground_truth=3)
    assert [outcome["score"] for outcome in met] == [0.5] * 6
    assert max(outcome["running"] for outcome in outcomes(pool, *["0.05"] * 9)) <= 3


def test_calls_are_spread_over_the_processes(make: Callable[..., KillablePool]) -> None:
    pids = [outcome["pid"] for outcome in outcomes(make(num_workers=2), *["0.2"] * 4)]
    assert sorted(map(pids.count, set(pids))) == [2, 2]


def test_a_stuck_call_times_out_alone_and_its_process_lives_on(make: Callable[..., KillablePool]) -> None:
    pool = make(timeout_seconds=2.0)
    pids = pool.pids()
    stuck, *others = outcomes(pool, "stuck", *["0.1"] * 6)
    assert isinstance(stuck, Failure)
    assert stuck.kind == "timeout"
    assert "longer than reward_model.timeout_seconds=2 and was cancelled" in stuck.detail
    assert [outcome["score"] for outcome in others] == [0.5] * 6
    assert pool.pids() == pids


@pytest.mark.parametrize(("answer", "kind"), [("block", "timeout"), ("exit", "crash"), ("stubborn", "timeout")])
def test_who_shared_a_process_that_was_killed_is_scored_alone(
    make: Callable[..., KillablePool], answer: str, kind: str
) -> None:
    """Which of them it was is found out by the second try. No innocent row fails, and none has the score 0."""
    pool = make(timeout_seconds=2.0)
    bad, *others = outcomes(pool, answer, "0.3", "0.4", "0.5")
    assert isinstance(bad, Failure)
    assert bad.kind == kind
    assert [outcome["score"] for outcome in others] == [0.5] * 3
    assert outcomes(pool, "0.1")[0]["score"] == 0.5


def test_an_error_is_its_calls_own(make: Callable[..., KillablePool]) -> None:
    raised, exited, unsendable, broken, good = outcomes(make(), "raise", "sys.exit", "lambda", "unpicklable", "0.1")
    assert "SystemExit: 3" in exited.detail
    assert (raised.kind, unsendable.kind, broken.kind, good["score"]) == (*["exception"] * 3, 0.5)
    assert "cannot be sent: it has no pickle" in broken.detail
    assert "TimeoutError: the judge does not answer" in raised.detail
    assert "_serve_together" not in raised.detail
    assert "cannot be sent" in unsendable.detail


def test_a_call_that_is_given_up_costs_no_other(make: Callable[..., KillablePool]) -> None:
    pool = make()
    futures = [pool.submit(call(answer)) for answer in ("stuck", "0.5", "0.5")]
    pool.cancel(futures[:1])
    given_up, *others = [future.result(60) for future in futures]
    assert isinstance(given_up, Failure)
    assert given_up.kind == "cancelled"
    assert [outcome["score"] for outcome in others] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("specs", "options", "each"),
    [
        ([spec("by_name")], {}, 8),
        ([spec("instance")], {}, 8),
        ([spec("judge"), spec("by_name")], {}, 8),
        ([spec("decorated")], {}, 1),
        ([spec("judge"), scoring_functions.spec_of(scoring_functions.length)], {}, 1),
        ([scoring_functions.spec_of(scoring_functions.length)], {}, 1),
        ([spec("batch")], {"is_batch": True}, 1),
    ],
    ids=["by name", "object", "several", "made plain", "one is plain", "plain", "batch"],
)
def test_what_blocks_or_takes_a_batch_has_a_process_to_itself(
    specs: list[FunctionSpec], options: Mapping[str, Any], each: int
) -> None:
    pool = KillablePool(specs, num_workers=1, timeout_seconds=60, async_calls=8, **options)
    try:
        assert pool.calls_each == each
        row = call("0.1")
        outcome = pool.submit(
            {f"{k}s": [v] for k, v in row.items() if k != "extra_info"} | {"extra_infos": [{}]} if options else row
        ).result(60)
        assert not isinstance(outcome, Failure)
    finally:
        pool.close()
