"""A stall is named by the chain of waits that leads to it. Time is a number here: no clock is read."""

from __future__ import annotations

import pytest

from dovetail.observability.stalls import StalledError, Waits

pytestmark = pytest.mark.unit


def sentence(waits: Waits, now: float) -> str:
    with pytest.raises(StalledError, match=r"^no progress for ") as caught:
        waits.check(now, limit_s=1e-9)
    return str(caught.value).partition(": ")[2]


def test_the_sentence_follows_the_chain_to_the_oldest_wait() -> None:
    waits = Waits()
    waits.waiting("trainer", "draw 12", since=0)
    waits.waiting("trainer", "draw 15", since=0)
    waits.waiting("draw 12", "engine 1", "engine", since=20)
    waits.waiting("draw 15", "engine 0", "engine", since=339)
    assert sentence(waits, 340) == (
        "trainer waits for draws 12, 15 (oldest 340 s); draw 12 waits for engine 1, its last token 320 s ago."
    )


@pytest.mark.parametrize("what", ["its score", "weights of version 7", "tool python"])
def test_every_kind_of_wait_is_named(what: str) -> None:
    waits = Waits()
    waits.waiting("trainer", "draw 3", since=0)
    waits.waiting("draw 3", what, since=10)
    assert sentence(waits, 50) == f"trainer waits for draw 3 for 50 s; draw 3 waits for {what} for 40 s."


def test_tokens_are_progress_however_long_the_trainer_waits() -> None:
    waits = Waits()
    waits.waiting("trainer", "draw 3", since=0)
    for now in range(0, 5000, 100):
        waits.waiting("draw 3", "engine 0", "engine", since=now - 1)
        waits.check(now, limit_s=300)
    with pytest.raises(
        StalledError, match=r"^no progress for 301 s: trainer waits for draw 3 for 5200 s; draw 3 waits"
    ):
        waits.check(5200, limit_s=300)
    waits.check(5200, limit_s=0)


def test_one_stuck_draw_among_many_is_the_one_that_is_named() -> None:
    waits = Waits()
    for draw in range(40):
        waits.waiting("trainer", f"draw {draw}", since=draw)
        waits.waiting(f"draw {draw}", "engine 0", "engine", since=950)
    waits.waiting("draw 31", "engine 0", "engine", since=600)
    with pytest.raises(StalledError) as caught:
        waits.check(1000, limit_s=300)
    assert str(caught.value) == (
        "no progress for 400 s: trainer waits for draws 31, 0, 1, 2, 3 and 35 more (oldest 1000 s); draw 31 waits for "
        "engine 0, its last token 400 s ago."
    )


def test_waits_for_each_other_are_a_circle() -> None:
    waits = Waits()
    waits.waiting("trainer", "draw 1", since=0)
    waits.waiting("draw 1", "weights of version 7", since=5)
    waits.waiting("weights of version 7", "trainer", since=6)
    assert sentence(waits, 10).endswith("they wait for each other.")
    with pytest.raises(StalledError):
        waits.check(400, limit_s=300)


def test_nothing_is_said_when_nobody_waits() -> None:
    waits = Waits()
    waits.waiting("trainer", "draw 1", since=0)
    waits.clear()
    waits.check(10_000, limit_s=300)
