"""What is on the screen, at every width, at every moment."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from dovetail.observability.console import LiveConsole, PlainConsole, make_console
from dovetail.observability.console_view import ConsoleState, draw, duration, number, sparkline

pytestmark = pytest.mark.unit

METRICS = {
    "critic/score/mean": 0.5,
    "response_length/mean": 143.0,
    "actor/entropy": 1.25,
    "actor/ppo_kl": 0.00012,
    "actor/grad_norm": 0.3,
    "reward/failed": 2.0,
    "timing_s/step": 8.0,
    "timing_s/gen": 5.0,
    "timing_s/update_actor": 3.0,
    "timing_s/agent_loop/generate_sequences/mean": 4.0,  # a part of gen
    "perf/throughput": 2310.4,
    "val-core/openai/gsm8k/reward/mean@4": 0.1,
    "val-core/openai/gsm8k/acc/mean@4": 0.25,
}


def show(state: ConsoleState, now: float, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(draw(state, now, width))
    return captured.get()


def test_the_picture_shows_step_phase_reward_times_and_metrics() -> None:
    now = [100.0]
    state = ConsoleState("p/e", 20, clock=lambda: now[0])
    now[0] += 16.0
    state.end_step(2, METRICS)
    state.event("checkpoint", 2, {"seconds": 1.5})
    state.phase("gen")
    now[0] += 2.0
    text = show(state, now[0], 100)
    for words in (
        "p/e", "2/20", "gen  2.0 s", "0.5  best 0.5", "update actor", "3.00 s", "38%",
        "step 2   openai/gsm8k acc mean@4 0.250", "entropy", "1.20e-04", "step 2: checkpoint (seconds 1.5)",
        "0:18 elapsed · 2:22 left",
    ):  # fmt: skip
        assert words in text, words
    assert "agent loop" not in text


@pytest.mark.parametrize("width", [44, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    state = ConsoleState("a project with a long name/and an experiment with a longer one", 1000)
    for step in range(1, 300):
        state.end_step(step, {**METRICS, "critic/score/mean": step / 300})
    state.phase("compute_ref_log_prob")
    state.event("checkpoint", 3, {"path": "runs/" + "x" * 200})
    assert max(map(len, show(state, state.started + 100, width).splitlines())) <= width


def test_a_long_line_is_cut_and_not_its_label() -> None:
    state = ConsoleState("p/e", 20)
    state.end_step(2, METRICS | {"val-core/a/data/source/with/a/long/name/acc/mean@4": 0.5, "perf/mfu/actor": 0.4})
    lines = show(state, state.started, 60).splitlines()
    assert [line[2:14].strip() for line in lines if line.endswith("… │")] == [
        "validation",
        "last step",
    ]


def test_a_wait_takes_the_place_of_the_bar_until_the_phase_ends() -> None:
    state = ConsoleState("p/e", 20)
    state.end_step(2, METRICS)
    state.phase("gen")
    height = len(show(state, state.started, 80).splitlines())
    state.waits = "the trainer waits for draw 12 for 40 s"
    assert state.waits in show(state, state.started, 80)
    assert len(show(state, state.started, 80).splitlines()) == height
    state.waits += "; draw 12 waits for engine 0, its last token 35 s ago"
    shown = show(state, state.started, 60)
    assert "its last" in shown
    assert max(map(len, shown.splitlines())) <= 60
    state.phase("update_actor")
    assert "waits" not in show(state, state.started, 80)


def test_the_height_does_not_change_between_phases() -> None:
    state = ConsoleState("p/e", 20)
    state.end_step(1, METRICS)
    heights = []
    for phase in (None, "gen", "update_actor"):
        state.phase(phase)
        heights.append(len(show(state, state.started + 1, 100).splitlines()))
    assert len(set(heights)) == 1


def test_a_run_that_has_not_begun_can_be_drawn() -> None:
    assert "0/5" in show(ConsoleState("p/e", 5), 0.0, 80)


def test_a_pipe_gets_one_plain_line_per_step() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 100, stream=stream)
    assert isinstance(console, PlainConsole)
    console.phase("gen")
    console.end_step(12, METRICS)
    console.close()
    assert stream.getvalue() == (
        "step 12/100  reward 0.5  len 143  entropy 1.25  kl 1.20e-04  grad 0.3  failed 2  8.0 s  "
        "2,310 tokens/s per device  openai/gsm8k acc mean@4 0.250\n"
        "a step takes 8.0 s; time left: about 12 minutes (88 steps)\n"
    )


def test_scores_of_a_validation_are_on_the_line_of_the_step_alone() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 100, stream=stream)
    console.event("validation", 0, {"val-core/addition/acc/mean@1": 0.25})
    console.end_step(0, {"val-core/addition/acc/mean@1": 0.25})
    console.event("validation", 1, {"val/loss": 0.5})
    assert stream.getvalue() == "step 0/100  addition acc mean@1 0.250\nstep 1: validation (val/loss 0.5)\n"


def test_lengths_of_a_validation_are_beside_its_scores() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 100, stream=stream)
    lengths = {"val-aux/response_length/mean": 61.25, "val-aux/response_length/clip_ratio": 0.375}
    console.end_step(0, {"val-core/addition/acc/mean@1": 0.25, **lengths})
    assert stream.getvalue() == "step 0/100  addition acc mean@1 0.250  val len 61.25  val truncated 38%\n"
    state = ConsoleState("p/e", 20)
    state.end_step(2, {**METRICS, **lengths})
    assert "step 2   openai/gsm8k acc mean@4 0.250   val len 61.25   val truncated 38%" in show(
        state, state.started, 100
    )
    state.end_step(4, {"val-core/dovetail/multiplication/reward/mean@1": 0.5, **lengths})
    assert "step 4   dovetail/multiplication reward mean@1 0.500   val len" in show(state, state.started, 80)


def test_a_step_without_a_number_has_no_line() -> None:
    """Of fine-tuning: the loss before the first step is on the line of the validation."""
    stream = io.StringIO()
    console = make_console("p/e", 100, stream=stream)
    console.event("validation", 0, {"val/loss": 7.0})
    console.end_step(0, {"val/loss": 7.0})
    assert stream.getvalue() == "step 0: validation (val/loss 7)\n"


def test_a_line_shows_the_validation_of_its_own_step_only() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 3, stream=stream)
    later = {name: value for name, value in METRICS.items() if not name.startswith("val-")}
    for step, metrics in enumerate((METRICS, later)):
        console.end_step(step, metrics)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert ["gsm8k" in line for line in lines] == [True, False]


def test_a_resumed_run_is_expected_to_take_the_time_of_its_own_steps() -> None:
    now = [100.0]
    state = ConsoleState("p/e", 100, clock=lambda: now[0])
    state.event("resume", 50, {})
    assert state.seconds_left(now[0]) is None
    assert "50/100" in show(state, now[0], 80)
    now[0] += 10.0
    state.end_step(51, METRICS)
    assert state.seconds_left(now[0]) == 8.0 * 49


def test_the_live_console_draws_and_gives_logging_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    console = make_console("p/e", 3, stream=stream, live=True)
    assert isinstance(console, LiveConsole)
    assert handler not in logging.root.handlers
    console.phase("gen")
    logging.getLogger("dovetail.test").warning("a line above the picture")
    console.end_step(1, METRICS)
    console.close()
    assert logging.root.handlers == [handler]
    assert "a line above the picture" in stream.getvalue()
    assert "1/3" in stream.getvalue()


def test_sparklines_show_the_whole_history() -> None:
    assert sparkline([0, 1, 2, 3], 10) == "▁▃▆█"
    assert sparkline(list(range(1000)), 4) == "▁▃▆█"
    assert sparkline([2, 2], 10) == "▅▅"
    assert sparkline([float("nan")], 10) == ""


def test_numbers_and_times_are_short() -> None:
    assert [number(value) for value in (0, 12345.6, 0.00012, 1.23456)] == ["0", "12,346", "1.20e-04", "1.235"]
    assert [duration(value) for value in (7, 760, 11050)] == ["0:07", "12:40", "3:04:10"]


def test_the_loss_of_fine_tuning_is_on_the_line() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 1, stream=stream)
    console.end_step(1, {"train/loss": 1.7333, "actor/grad_norm": 20.08})
    console.close()
    assert stream.getvalue() == "step 1/1  loss 1.733  grad 20.08\n"


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
