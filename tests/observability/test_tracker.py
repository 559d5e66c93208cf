"""One call per step reaches the folder, the console and every sink."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.names import LOGGERS
from dovetail.observability import sinks, waits
from dovetail.observability import tracker as tracker_module
from dovetail.observability.console import make_console
from dovetail.observability.run_folder import RunFolder
from dovetail.observability.sinks import RunFacts, ShownAnswer, choose_answers, markdown_table
from dovetail.observability.timers import PhaseTimers
from dovetail.observability.tracker import Tracker, check_logger_names, finite_numbers

pytestmark = pytest.mark.unit


class ListSink(sinks.Sink):
    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.shown: list[tuple[int, list[ShownAnswer]]] = []
        self.events: list[tuple[str, int]] = []
        self.is_open = True

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        self.events.append((kind, step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        self.shown.append((step, list(answers)))

    def close(self) -> None:
        self.is_open = False


def make_tracker(path: Path, names: list[str], stream: io.StringIO | None = None) -> Tracker:
    folder = RunFolder(path)
    folder.start()
    console = make_console("p/e", 10, stream=stream or io.StringIO())
    return Tracker(names, folder, project="p", experiment="e", config={"a": 1}, console=console)


def test_a_step_reaches_folder_console_and_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ListSink] = []

    def open_sink(facts: RunFacts) -> ListSink:
        opened.append(ListSink(facts))
        return opened[-1]

    monkeypatch.setitem(sinks.SINKS, "wandb", open_sink)
    stream = io.StringIO()
    with make_tracker(tmp_path, ["console", "wandb"], stream) as tracker:
        tracker.log(1, {"critic/score/mean": 0.25, "note": "text", "bad": float("inf")})
        tracker.event("checkpoint", 1, path="global_step_1")
    assert tracker.folder.read_metrics() == [{"step": 1, "critic/score/mean": 0.25, "note": "text", "bad": None}]
    assert opened[0].steps == [(1, {"critic/score/mean": 0.25})]
    assert opened[0].events == [("checkpoint", 1)]
    assert not opened[0].is_open
    assert stream.getvalue() == "step 1/10  reward 0.25\nstep 1: checkpoint (path global_step_1)\n"


def test_a_tracker_that_takes_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[waits.Wait] = []

    class Slow(ListSink):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            named.extend(waits._REGISTER.look())

    monkeypatch.setattr(tracker_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(waits, "_REGISTER", waits._Register())
    monkeypatch.setitem(sinks.SINKS, "wandb", Slow)
    with make_tracker(tmp_path, ["wandb"]) as made:
        made.log(1, {})
    assert [(wait.who, wait.what) for wait in named] == [("the driver", "the tracker Slow")]


ANSWERS = [ShownAnswer("2 + 2", "[bold]4", 0.5), ShownAnswer("3 + 3", "", None)]
SHOWN = (
    "step 3: validation answer, score 0.5\n  input: 2 + 2\n  output: [bold]4\n"
    "step 3: validation answer, score none\n  input: 3 + 3\n  output: \n"
)


def test_answers_are_shown_in_the_sinks_and_only_without_one_in_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = ListSink(RunFacts("p", "e", {}, tmp_path))
    monkeypatch.setitem(sinks.SINKS, "wandb", lambda facts: sink)
    with_sink, alone = io.StringIO(), io.StringIO()
    with make_tracker(tmp_path, ["console", "wandb"], with_sink) as tracker:
        tracker.show_answers(3, ANSWERS)
    with make_tracker(tmp_path, ["console"], alone) as tracker:
        tracker.show_answers(3, ANSWERS)
    assert sink.shown == [(3, ANSWERS)]
    assert with_sink.getvalue() == ""
    assert alone.getvalue() == SHOWN


def test_a_live_console_shows_answers_as_they_are() -> None:
    stream = io.StringIO()
    console = make_console("p/e", 10, stream=stream, live=True)
    console.answers(3, ANSWERS)
    console.close()
    assert "[bold]4" in stream.getvalue()


def test_every_validation_shows_the_same_places() -> None:
    def rows(name: str) -> list[dict[str, object]]:
        return [{"input": str(row), "output": name, "score": 1.0} for row in range(20)]

    first, second = choose_answers(rows("a"), 5), choose_answers(rows("b"), 5)
    assert [answer.input for answer in first] == [answer.input for answer in second]
    assert len({answer.input for answer in first}) == 5
    assert choose_answers(rows("a"), 0) == []
    assert len(choose_answers(rows("a"), -1)) == len(choose_answers(rows("a"), 50)) == 20


def test_an_answer_stays_in_its_cell_of_a_markdown_table() -> None:
    table = markdown_table([ShownAnswer("a|b", "one\n<two>", 0.25)])
    assert table == "| input | output | score |\n| --- | --- | --- |\n| a&#124;b | one<br>&lt;two&gt; | 0.25 |"


def test_without_console_nothing_is_shown_and_the_folder_is_still_written(tmp_path: Path) -> None:
    stream = io.StringIO()
    with make_tracker(tmp_path, ["file"], stream) as tracker:
        tracker.log(1, {"x": 1})
    assert stream.getvalue() == ""
    assert tracker.folder.read_metrics() == [{"step": 1, "x": 1}]


def test_an_unknown_tracker_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.logger=wandbb is not known\. Did you mean wandb"):
        make_tracker(tmp_path, ["wandbb"])


def test_a_users_tracker_is_opened_by_its_name_and_replaces_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "SINKS", dict(sinks.SINKS))
    monkeypatch.setattr(tracker_module, "SINKS", sinks.SINKS)
    sinks.register_tracker("mine")(ListSink)
    with make_tracker(tmp_path, ["mine"]) as tracker:
        tracker.log(1, {"x": 1})
        (sink,) = tracker._sinks
    assert isinstance(sink, ListSink)
    assert sink.steps == [(1, {"x": 1.0})]
    with pytest.raises(ValueError, match="'wandb' is already registered"):
        sinks.register_tracker("wandb")(ListSink)


def test_the_check_of_a_configuration_knows_the_trackers_there_are() -> None:
    check_logger_names(LOGGERS)
    assert set(sinks.SINKS) < set(LOGGERS)


def test_a_missing_library_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"trainer.logger=absent needs the package absent: .*pip install absent, or"):
        sinks.need("absent.client")


def test_when_one_sink_cannot_open_the_others_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ListSink(RunFacts("p", "e", {}, tmp_path))

    def fail(facts: RunFacts) -> ListSink:
        raise ImportError("not installed")

    monkeypatch.setitem(sinks.SINKS, "wandb", lambda facts: first)
    monkeypatch.setitem(sinks.SINKS, "mlflow", fail)
    with pytest.raises(ImportError):
        sinks.open_sinks(["wandb", "mlflow"], RunFacts("p", "e", {}, tmp_path))
    assert not first.is_open


def test_only_finite_numbers_go_to_sinks() -> None:
    assert finite_numbers({"a": 1, "b": True, "c": "2", "d": float("nan"), "e": None}) == {"a": 1.0, "b": 1.0}


def test_phases_add_up_and_report_the_enclosing_one() -> None:
    now, seen = [0.0], []
    timers = PhaseTimers(seen.append, clock=lambda: now[0])
    with timers("step"):
        for seconds in (1.0, 2.0):
            with timers("gen"):
                now[0] += seconds
        now[0] += 0.5
    assert seen == ["step", "gen", "step", "gen", "step", None]
    assert timers.take() == {"timing_s/gen": 3.0, "timing_s/step": 3.5}
    assert timers.take() == {}


def test_a_phase_that_raises_is_still_timed() -> None:
    now = [0.0]
    timers = PhaseTimers(clock=lambda: now[0])

    def work() -> None:
        with timers("gen"):
            now[0] += 2.0
            raise KeyError("x")

    with pytest.raises(KeyError):
        work()
    assert timers.seconds() == {"gen": 2.0}
    assert timers.interrupted == "gen"
    with timers("save_checkpoint"):
        pass
    assert timers.interrupted is None, "it was caught"
