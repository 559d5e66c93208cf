"""How long a run will take is said after its first step, from that step."""

from __future__ import annotations

import io

import pytest

from dovetail.observability.console import make_console
from dovetail.observability.console_view import ConsoleState

pytestmark = pytest.mark.unit


def test_the_first_step_tells_how_long_the_others_take() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 20, stream=stream)
    console.end_step(0, {"val-core/addition/acc/mean@1": 0.03})
    console.end_step(1, {"timing_s/step": 15.0, "timing_s/gen": 9.0})
    console.end_step(2, {"timing_s/step": 15.0})
    lines = [line for line in stream.getvalue().splitlines() if "time left" in line]
    assert lines == ["a step takes 15.0 s; time left: about 5 minutes (19 steps)"]


def test_the_live_picture_says_it_above_itself() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 3, stream=stream, live=True)
    console.end_step(1, {"timing_s/step": 20.0})
    console.close()
    assert "a step takes 20.0 s; time left: about 40 seconds (2 steps)" in stream.getvalue()


def test_a_run_of_one_step_has_nothing_to_estimate() -> None:
    stream = io.StringIO()
    make_console("p/e", 1, stream=stream).end_step(1, {"timing_s/step": 20.0})
    assert "here" not in stream.getvalue()


def test_starting_up_is_not_taken_for_a_part_of_every_step() -> None:
    now = [0.0]
    state = ConsoleState("p/e", 10, clock=lambda: now[0])
    now[0] = 60.0  # Ray, workers and the first validation
    state.end_step(1, {"timing_s/step": 5.0, "timing_s/testing": 1.0})
    assert state.seconds_left(now[0]) == 6.0 * 9
    assert state.seconds_left(now[0] + 4.0) == 6.0 * 9 - 4.0
