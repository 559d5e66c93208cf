"""Waits end or are named: who waits for what, since when, and the chain of waits that a stall comes from."""

from __future__ import annotations

import bdb
import logging
import queue
import threading
from types import FrameType

import pytest

from dovetail.observability import waits
from dovetail.observability.stalls import StalledError, Waits
from dovetail.observability.waits import WaitTimeout, waiting

pytestmark = pytest.mark.unit


def test_a_wait_past_its_limit_raises_with_both_sides() -> None:
    with waiting("rank 3", "an answer of the server", limit_s=0.0) as wait:
        with pytest.raises(queue.Empty):
            queue.Queue().get(timeout=wait.left())
        with pytest.raises(WaitTimeout, match=r"rank 3 waits for an answer of the server since \d\d:.*limit 0.*: gone"):
            wait.check("gone")


def test_progress_starts_the_limit_anew() -> None:
    with waiting("a", "b", limit_s=1000.0) as wait:
        wait.began -= 2000.0
        assert wait.is_over()
        wait.restart()
        assert not wait.is_over()
        assert 0 < wait.left() <= 1000.0
        wait.check()


def test_a_wait_without_a_timeout_is_named_by_the_watching_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody calls anything in the thread that waits: the report comes from outside, with its stack."""
    monkeypatch.setattr(waits, "LOOK_S", 0.01)
    register = waits._Register()
    monkeypatch.setattr(waits, "_REGISTER", register)
    said, texts = threading.Event(), []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            said.set()

    logger = logging.getLogger(waits.__name__)
    handler = Listen()
    logger.addHandler(handler)
    try:
        with waiting("this test", "an event that comes only with the report", limit_s=0.0):
            assert said.wait(60)
    finally:
        logger.removeHandler(handler)
    assert "this test waits for an event that comes only with the report since" in texts[0]
    assert "test_waits.py" in texts[0], "the stack of the waiting thread"


def test_a_long_wait_is_named_again_when_it_has_doubled() -> None:
    register = waits._Register()
    wait = waits.Wait("a", "b", 10.0)
    register._open.add(wait)
    assert register.look() == []
    wait.began -= 11.0
    assert register.look() == [wait]
    assert register.look() == []
    wait.began -= 12.0
    assert register.look() == [wait]
    register.remove(wait)
    assert register.look() == []


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


def test_a_wait_that_lasts_too_long_is_told_so_once_with_its_stack() -> None:
    register, said = waits._Register(), []
    wait = waits.Wait("a", "b", 1.0, 10.0, lambda over, stack: said.append((over, stack)))
    register.add(wait)
    wait.began -= 9.0
    register.look()
    assert not said
    wait.began -= 2.0
    register.look()
    register.look()
    assert [over for over, _ in said] == [wait]
    assert "test_waits.py" in said[0][1]
    register.remove(wait)


def test_time_at_a_breakpoint_and_time_in_which_the_process_is_stopped_do_not_count() -> None:
    register, said = waits._Register(), []
    at_prompt, go_on = threading.Event(), threading.Event()

    class Debugger(bdb.Bdb):
        def user_line(self, frame: FrameType) -> None:
            at_prompt.set()
            go_on.wait(60)
            self.set_continue()

    stopped = threading.Thread(target=lambda: Debugger().run("pass", {"__name__": "users"}), daemon=True)
    stopped.start()
    assert at_prompt.wait(60)
    wait = waits.Wait("a", "b", 1.0, 10.0, lambda over, stack: said.append(over), thread=stopped.ident or 0)
    register._open.add(wait)
    wait.began -= 1000.0
    assert register.look() == []
    assert wait.waited() < 1.0, "counts from when somebody last stood there"
    go_on.set()
    stopped.join(60)
    wait.began -= 1000.0
    register.skip(995.0)
    register.look()
    assert not said
