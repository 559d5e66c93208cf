"""What is read from a run folder: all of it, only what is new, and nothing that is broken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dovetail.dashboard.async_view import busy_shares, idle_shares, staleness, waits
from dovetail.dashboard.charts import OVERVIEW, binned_means, names_of, points, smoothed, thinned
from dovetail.dashboard.config_view import config_rows, read_config
from dovetail.dashboard.response_file import ResponseFile, parse_head
from dovetail.dashboard.responses import Filter, Order, ResponseFolder, Wish
from dovetail.dashboard.run_files import DashboardError, EventLog, MetricsTable, parse_object
from dovetail.dashboard.runs import Runs
from dovetail.dashboard.step_times import Timelines, phases, what_it_waits_for
from dovetail.dashboard.trajectories import summary, time_of_trajectories
from dovetail.observability.run_folder import RunFolder
from tests.dashboard.synthetic import (
    answer_row,
    line,
    metrics_row,
    timeline_row,
    write_agent_run,
    write_async_run,
    write_config,
    write_run,
)

pytestmark = pytest.mark.unit


# ---- lines ----


@pytest.mark.parametrize(
    "text",
    ['{"a": 1.5e-3, "b": null}', '{"a": NaN, "b": -Infinity}', r'{"a": "\ud83d\ude00 \u00e9"}',
     '{"n": 123456789012345678901234567890}', '{"a": {"b": [1, 2.0, true]}, "a": 2}', '{"a": "half'],
)  # fmt: skip
def test_a_line_says_what_the_standard_library_reads(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    assert repr(parse_object(text.encode())) == repr(expected)


def test_half_a_surrogate_becomes_a_question_mark() -> None:
    assert parse_object(rb'{"a\udfff": ["x\ud800y", 1]}') == {"a?": ["x?y", 1]}


# ---- numbers ----


def test_a_table_grows_with_its_file_and_waits_for_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    table = MetricsTable(file)
    table.refresh()
    assert len(table) == 0
    second = line({"step": 2, "a": 2.0, "b": 5})
    file.write_text(line({"step": 1, "a": 1.0, "bad": None}) + second[:9])
    table.refresh()
    assert table.steps.tolist() == [1]
    assert np.isinf(table.column("bad")).tolist() == [True]
    with file.open("a") as out:
        out.write(second[9:] + "no json\n" + '["no object"]\n' + line({"a": 7}))
    table.refresh()
    assert table.finite("a")[1].tolist() == [1.0, 2.0]
    assert table.finite("b")[0].tolist() == [2]
    assert table.bad_lines == 3
    assert table.latest("bad") is None


def test_a_resumed_run_takes_its_later_steps_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start()
    for step in range(1, 6):
        folder.log_metrics(step, {"a": float(step)})
    table = MetricsTable(tmp_path / "metrics.jsonl")
    table.refresh()
    folder.resume(2)
    folder.log_metrics(3, {"a": 30.0})
    table.refresh()
    assert table.steps.tolist() == [1, 2, 3]
    assert table.finite("a")[1].tolist() == [1.0, 2.0, 30.0]


def test_few_points_keep_every_spike_and_a_true_step() -> None:
    values = np.zeros(10_000)
    values[[17, 6001]] = 5.0, -3.0
    drawn = thinned(values, 300)
    assert len(drawn) <= 302
    assert {0, 17, 6001, 9999} <= set(drawn.tolist())
    assert thinned(values[:50], 300).tolist() == list(range(50))


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smoothed(np.full(20, 4.0), 0.9) == pytest.approx(np.full(20, 4.0))
    found = smoothed(np.array([2.0, 0.0, 0.0]), 0.5)
    assert found == pytest.approx([2.0, 2 / 3, 2 / 7])


def test_means_over_neighbouring_steps_keep_the_total() -> None:
    steps, columns = np.arange(1, 1001), np.vstack([np.arange(1000.0), np.ones(1000)])
    at, means = binned_means(steps, columns, 100)
    assert len(at) == 100
    assert at[0] == 1
    assert means.sum(axis=1) * 10 == pytest.approx(columns.sum(axis=1))


def test_charts_find_their_metrics_and_smooth_before_they_thin(tmp_path: Path) -> None:
    table = Runs([write_run(tmp_path / "run", steps=2000, rollouts_per_step=0)]).get("run").metrics
    accuracy = next(chart for chart in OVERVIEW if chart.key == "accuracy")
    assert names_of(accuracy, table.names) == ["reward/acc/mean", "val-core/toy/acc/mean@1"]
    found = points(table, "response_length/mean", smoothing=0.9, most=100, first=500, last=600)
    whole = points(table, "response_length/mean", smoothing=0.9, most=10_000)
    assert min(found["x"]) >= 500
    assert max(found["x"]) <= 600
    assert (
        dict(zip(whole["sx"], whole["sy"], strict=True))[550] == dict(zip(found["sx"], found["sy"], strict=True))[550]
    )


def test_phases_add_up_to_the_step_and_the_longest_is_named(tmp_path: Path) -> None:
    run = Runs([write_run(tmp_path / "run")]).get("run")
    found = phases(run.metrics, 100)
    totals = np.sum([phase["seconds"] for phase in found["phases"]], axis=0)
    assert totals == pytest.approx(run.metrics.column("timing_s/step"), rel=1e-4)
    waits = what_it_waits_for(run.metrics, run.timelines)
    assert "is generation, then actor update with" in waits["sentence"]
    assert "Workers are busy 89% of the time in step 40" in waits["sentence"]
    assert "rollout.name" in waits["advice"]


def test_idle_time_is_what_no_call_covers(tmp_path: Path) -> None:
    (tmp_path / "timeline.jsonl").write_text(line(timeline_row(1)) + '{"step": 2, "spans": [["odd"], 3]}\n')
    timelines = Timelines(tmp_path / "timeline.jsonl")
    timelines.refresh()
    first = timelines.of(1)
    assert first is not None
    assert busy_shares(first["spans"]) == {"worker": pytest.approx((2.49 + 2.74 + 2 * 1.9) / 2 / 5.1)}
    second = timelines.of(2)
    assert second is not None
    assert second["spans"] == []
    assert timelines.of(3) is None
    assert timelines.peaks == {"generate_sequences": 1.5, "update_actor": 2.5}


def test_calls_that_are_bookkeeping_are_not_on_the_timeline(tmp_path: Path) -> None:
    row = timeline_row(1)
    row["spans"].append(["worker 0", "_query_dispatch_collect_info", 2.6, 2.7, None])
    (tmp_path / "timeline.jsonl").write_text(line(row))
    timelines = Timelines(tmp_path / "timeline.jsonl")
    timelines.refresh()
    shown = timelines.of(1)
    assert shown is not None
    assert {span["phase"] for span in shown["spans"]} == {"gen", "update_actor", "generate_sequences"}


def test_waiting_is_named_by_what_the_other_side_does(tmp_path: Path) -> None:
    run = Runs([write_async_run(tmp_path / "run")]).get("run")
    several = run.timelines.of(8, count=3)
    assert several is not None
    assert several["starts"] == [{"step": 6, "start": 0.0}, {"step": 7, "start": 6.0}, {"step": 8, "start": 12.0}]
    gaps = {(wait["worker"], wait["phase"]): (wait["start"], wait["end"]) for wait in waits(several["spans"][:5])}
    assert gaps == {
        ("worker 0", "groups"): (0.0, 2.0), ("worker 0", "driver"): (5.0, 6.0), ("engine 0", "draws"): (4.0, 5.5)
    }  # fmt: skip
    idle = {wait["key"]: wait["shares"] for wait in run.timelines.idle(2)["waits"]}
    assert run.timelines.idle(2)["steps"] == [7, 8]
    assert idle["groups"] == pytest.approx([2 / 6] * 2)
    assert idle["draws"] == pytest.approx([1.5 / 6] * 2)
    assert idle["commit_weights"] == pytest.approx([0.5 / 6] * 2)
    words = what_it_waits_for(run.metrics, run.timelines)
    assert "is waiting for groups, then actor update" in words["sentence"]
    # Of the 6 seconds of a step an engine generates 4; the run was resumed after step 4.
    assert "In the last 4 steps the trainer works 50% of the time and the engines 67%" in words["sentence"]
    assert "max_staleness" in words["advice"]


def test_idle_and_busy_shares_of_each_side_are_the_whole_step() -> None:
    spans = [
        {"worker": row, "phase": phase, "start": start, "end": end, "memory": None}
        for row, phase, start, end in [
            ("driver", "gen", 0.0, 3.0), ("driver", "testing", 6.0, 10.0), ("worker 0", "update_actor", 3.0, 6.0),
            ("engine 0", "generate_groups", 0.0, 9.0), ("engine 0", "commit_weights", 5.0, 6.0),
            ("engine 1", "generate_groups", 10.0, 10.0),
        ]
    ]  # fmt: skip
    idle, busy = idle_shares(spans), busy_shares(spans)
    assert idle == pytest.approx({"groups": 0.3, "testing": 0.4, "draws": 0.55, "commit_weights": 0.05})
    assert busy == pytest.approx({"worker": 0.3, "engine": 0.4})


def test_the_time_that_a_run_was_down_is_nobodys_wait(tmp_path: Path) -> None:
    folder = write_async_run(tmp_path / "run")
    rows = [json.loads(text) for text in (folder / "timeline.jsonl").read_text().splitlines()]
    for row in rows[6:]:
        row["time"] += 86_400
    (folder / "timeline.jsonl").write_text("".join(map(line, rows)))
    (folder / "events.jsonl").write_text(line({"time": 0.0, "kind": "resume", "step": 6}))
    run = Runs([folder]).get("run")
    several = run.timelines.of(8, count=3)
    assert several is not None
    assert several["starts"] == [{"step": 7, "start": 0.0}, {"step": 8, "start": 6.0}]
    before = run.timelines.of(6, count=3)
    assert before is not None
    assert [start["step"] for start in before["starts"]] == [4, 5, 6]
    assert "In the last 2 steps the trainer works 50% of" in what_it_waits_for(run.metrics, run.timelines)["sentence"]


def test_the_start_of_a_run_is_no_step(tmp_path: Path) -> None:
    """Building models takes longer than any step; until a step has a timeline nothing is said of who works."""
    folder = write_async_run(tmp_path / "run")
    row = json.loads((folder / "timeline.jsonl").read_text().splitlines()[0])
    (folder / "timeline.jsonl").write_text(line(row | {"step": 0}))
    run = Runs([folder]).get("run")
    assert "works" not in what_it_waits_for(run.metrics, run.timelines)["sentence"]


def test_the_seconds_of_a_step_say_when_validation_is_in_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = Runs([folder]).get("run")
    assert "included" not in what_it_waits_for(run.metrics, run.timelines)["sentence"]
    rows = [metrics_row(step) | {"timing_s/testing": 1.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(map(line, rows)))
    run.refresh()
    sentence = what_it_waits_for(run.metrics, run.timelines)["sentence"]
    assert "s, validation and checkpoints included) is generation" in sentence


def test_of_engines_that_take_turns_with_the_trainer_the_page_says_how_to_overlap_them(tmp_path: Path) -> None:
    folder = write_async_run(tmp_path / "run")
    rows = [metrics_row(step) | {"timing_s/gen": 9.0, "timing_s/step": 12.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(map(line, rows)))
    run = Runs([folder]).get("run")
    assert "one_step_off" in what_it_waits_for(run.metrics, run.timelines)["advice"]


def test_staleness_is_shares_of_tokens_up_to_the_largest_lag_seen(tmp_path: Path) -> None:
    run = Runs([write_async_run(tmp_path / "run")]).get("run")
    found = staleness(run.metrics)
    assert found["steps"] == list(range(1, 9))
    assert [lag["name"] for lag in found["lags"]] == ["0", "1", "2"]
    assert [lag["mean"] for lag in found["lags"]] == pytest.approx([0.5, 0.3, 0.2])
    assert staleness(Runs([write_run(tmp_path / "sync")]).get("sync").metrics)["lags"] == []


def test_the_time_of_trajectories_is_engine_tools_and_idle_and_no_phase_of_its_own(tmp_path: Path) -> None:
    run = Runs([write_agent_run(tmp_path / "run")]).get("run")
    found = time_of_trajectories(run.metrics, 100)
    engine, tools, idle = (np.array(part["seconds"]) for part in found["parts"])
    assert set(engine) == {1.0}
    assert set(tools) == {0.5}
    assert engine + tools + idle == pytest.approx(run.metrics.column("timing_s/gen"), rel=1e-4)
    assert not any("agent_loop" in phase["key"] for phase in phases(run.metrics, 100)["phases"])
    assert time_of_trajectories(Runs([write_run(tmp_path / "plain")]).get("plain").metrics, 100)["parts"] == []


# ---- answers ----


def test_trajectories_are_filtered_by_outcome_and_tool_with_all_their_segments(tmp_path: Path) -> None:
    responses = Runs([write_agent_run(tmp_path / "run")]).get("run").responses("rollouts")
    counts = responses.page(3, Wish(), first=0, count=10)["counts"]
    assert counts["outcomes"] == {"finished": 4, "infra": 2}
    assert counts["tools"] == {"calculator": 2, "search": 2}

    def shown(wish: Wish) -> list[tuple[int, int]]:
        groups = responses.page(3, wish, first=0, count=10)["groups"]
        agents = [answer["agent"] for group in groups for answer in group["answers"]]
        return [(agent["trajectory"], agent["segment"]) for agent in agents]

    assert shown(Wish(outcome="infra")) == [(2, 0), (2, 0)]
    assert shown(Wish(tool="search")) == [(1, 0), (1, 1), (1, 0), (1, 1)]
    assert shown(Wish(tool="search", outcome="infra")) == []
    group = responses.page(3, Wish(), first=0, count=1)["groups"][0]
    assert (group["size"], group["num_trajectories"], group["scores"]) == (4, 3, [1.0, 0.5, 0.0])
    assert [answer["score"] for answer in group["answers"]] == [1.0, 0.5, 0.5, 0.0]
    failed = responses.response(3, 2)
    assert failed["agent"]["failures"] == 1
    assert failed["agent"]["seconds"] == {"generate": 1.0, "tool": 0.5}
    assert failed["events"][1]["failure"] == "timeout"
    assert failed["token_mask"] == [1, 1, 0, 0, 1, 1]


def test_a_record_that_is_not_as_it_should_be_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    odd = {"outcome": "finished", "events": [3, {"no": "kind"}, {"kind": "tool", "seconds": "x"}], "messages": "hello"}
    file = tmp_path / "step_1.jsonl"
    file.write_text(line(answer_row(1, 0) | odd) + line(answer_row(1, 1) | {"outcome": 7, "events": None}))
    first, second = (ResponseFolder(tmp_path, Path.resolve).response(1, row) for row in (0, 1))
    assert first["events"] == [{"kind": "tool", "seconds": "x"}]
    assert first["messages"] == []
    assert second["agent"] is None


@pytest.fixture
def answers(tmp_path: Path) -> ResponseFolder:
    return Runs([write_run(tmp_path / "run", steps=25)]).get("run").responses("rollouts")


@pytest.mark.parametrize(
    ("wanted", "rows", "groups"),
    [("all", 32, 4), ("wrong", 29, 4), ("truncated", 6, 4), ("no_signal", 8, 1), ("failed", 0, 0)],
)
def test_filters_show_the_answers_they_name(answers: ResponseFolder, wanted: Filter, rows: int, groups: int) -> None:
    page = answers.page(3, Wish(wanted), first=0, count=100)
    assert page["num_groups"] == groups
    assert sum(len(group["answers"]) for group in page["groups"]) == rows == page["counts"][wanted]


@pytest.mark.parametrize(
    ("order", "name", "sign"),
    [("longest", "length", -1), ("best", "score", -1), ("worst", "score", 1), ("gap", "gap", -1)],
)
def test_orders_sort_within_and_between_groups(answers: ResponseFolder, order: Order, name: str, sign: int) -> None:
    groups = answers.page(3, Wish(order=order), first=0, count=100)["groups"]
    firsts = [sign * group["answers"][0][name] for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        values = [sign * answer[name] for answer in group["answers"]]
        assert values == sorted(values)


def test_pages_and_words_narrow_a_step(answers: ResponseFolder) -> None:
    assert len(answers.page(3, Wish(), first=2, count=1)["groups"]) == 1
    found = answers.page(3, Wish(words="IN ROW 13 is"), first=0, count=10)
    assert [answer["row"] for group in found["groups"] for answer in group["answers"]] == [13]
    assert answers.response(3, 13)["token_entropies"] == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    with pytest.raises(DashboardError, match="step 3 has 32 responses; there is no response 99"):
        answers.response(3, 99)


def test_a_search_over_all_steps_comes_in_bites_and_finds_everything(answers: ResponseFolder) -> None:
    found, cursor, bites = [], -1, 0
    while cursor is not None:
        bite = answers.search(Wish(words="in row 5 is"), cursor=cursor, seconds=0.0, most=40)
        found += [answer["step"] for answer in bite["matches"]]
        cursor, bites = bite["next"], bites + 1
    assert found == list(range(25, 0, -1))
    assert bites == 25


def test_a_prompt_is_found_in_its_other_steps(answers: ResponseFolder) -> None:
    found = answers.steps_with_prompt(15, 8, cursor=-1, seconds=10.0)
    assert found["steps"] == [25, 5]
    group = answers.group_of_prompt(5, found["key"])
    assert group["prompt"] == answers.response(15, 8)["prompt"]
    assert len(group["answers"]) == 8


def test_the_index_reads_texts_that_look_like_its_own_keys(tmp_path: Path) -> None:
    trap = 'x, "response_ids": [1, 2], {"score": 9}\n'
    row = answer_row(1, 0, response=trap)
    (tmp_path / "step_1.jsonl").write_text(line(row) + '{"prompt": "half' + "\n" + line(answer_row(1, 1)))
    file = ResponseFile.read(tmp_path / "step_1.jsonl")
    assert (len(file.entries), file.bad_lines) == (2, 1)
    assert file.head(file.entries[0])["response"] == trap
    assert file.full_row(file.entries[0])["score"] == 1.0
    head = parse_head(line(row).encode().rstrip())
    assert head == {name: row[name] for name in list(row)[: list(row).index("response_ids")]}


def test_answers_that_are_written_anew_are_read_anew(answers: ResponseFolder) -> None:
    assert len(answers.file(3).entries) == 32
    answers.file(3).path.write_text(line(answer_row(3, 0)))
    assert len(answers.file(3).entries) == 1


# ---- settings ----


def test_settings_say_what_differs_from_defaults_and_hide_secrets(tmp_path: Path) -> None:
    values = {
        "trainer": {"seed": 7, "project_name": "dovetail"},
        "ray_init": {"api_key": "hush"},
        "data": {"train_batch_size": 64},
    }
    write_config(tmp_path, values)
    rows = {row["key"]: row for row in config_rows(read_config(tmp_path / "config.yaml"))}
    assert rows["trainer.project_name"]["is_default"]
    assert not rows["trainer.seed"]["is_default"]
    assert rows["data.train_batch_size"]["default"] == 1024
    assert "Prompts per training step" in rows["data.train_batch_size"]["meaning"]
    assert "hush" not in json.dumps(rows)


def test_settings_of_two_runs_side_by_side() -> None:
    rows = {
        row["key"]: row for row in config_rows({"trainer.seed": 1, "same": 2}, {"trainer.seed": 3, "same": 2, "new": 4})
    }
    assert rows["trainer.seed"]["differs"]
    assert not rows["same"]["differs"]
    assert (rows["new"]["value"], rows["new"]["other"]) == (None, 4)


@pytest.mark.parametrize("text", ["a: [1", "just words", "\x00"])
def test_a_broken_config_is_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DashboardError, match=r"config.yaml (is not YAML|holds no keys)"):
        read_config(tmp_path / "config.yaml")


def test_synthetic_rows_have_the_names_of_real_ones() -> None:
    assert {"critic/score/mean", "response_length/clip_ratio", "timing_s/gen"} <= set(metrics_row(1))


def test_the_mark_of_a_resume_says_which_settings_changed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log_event("resume", 4, changed={"actor.lr": (1e-6, 2e-6)})
    folder.log_event("checkpoint", 5)
    log = EventLog(tmp_path / "events.jsonl")
    log.refresh()
    assert [(mark["kind"], mark["text"]) for mark in log.marks()] == [
        ("resume", "actor.lr 1e-06 -> 2e-06"),
        ("checkpoint", ""),
    ]


def test_a_reply_of_an_environment_is_no_tool_call() -> None:
    reply = {"kind": "tool", "turn": 0, "seconds": 0.5, "name": "respond", "result": "4140"}
    call = {"kind": "tool", "turn": 0, "seconds": 0.25, "name": "search", "arguments": {}}
    found = summary({"outcome": "finished", "events": [reply, call, reply | {"failure": "timeout"}]})
    assert found is not None
    assert (found["calls"], found["failures"], found["tools"]) == (1, 1, ["search"])
    assert found["seconds"]["tool"] == pytest.approx(1.25)
