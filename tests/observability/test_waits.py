"""Waits end or are named: who waits for what, since when."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from dovetail.observability import waits
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
