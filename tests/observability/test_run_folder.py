"""The run folder survives kills, resumes and odd numbers, and belongs to one run: a second one is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.config import DovetailConfig
from dovetail.observability.run_folder import RunFolder, read_json_lines
from dovetail.observability.run_lock import LOCK, STALE_AFTER_S, RunFolderInUse, RunLock
from tests.programs import holding

pytestmark = pytest.mark.unit


def test_metrics_are_one_flat_object_per_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start()
    folder.log_metrics(1, {"actor/pg_loss": 0.1, "count": np.int64(3), "bad": float("nan")})
    folder.log_metrics(2, {"actor/pg_loss": np.float32(0.5)})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "actor/pg_loss": 0.1, "count": 3, "bad": None},
        {"step": 2, "actor/pg_loss": 0.5},
    ]


def test_arrays_of_an_answer_come_after_what_a_reader_looks_at_first(tmp_path: Path) -> None:
    ids, gaps = np.arange(4)[::2], np.array([0.25, float("nan")])
    rows = [
        {"response_ids": ids, "gaps": gaps, "response": 'a "b"', "flags": np.array([True]), "deep": {"x": gaps}},
        {"response_ids": np.array([], dtype=np.int64)},
    ]
    file = RunFolder(tmp_path).write_answers(1, rows)
    first, second = file.read_text().splitlines()
    numbers = {"response_ids": [0, 2], "gaps": [0.25, None]}
    assert json.loads(first) == {"response": 'a "b"', "flags": [True], "deep": {"x": [0.25, None]}, **numbers}
    assert first.index('"deep"') < first.index(', "response_ids": [') < first.index('"gaps"')
    assert json.loads(second) == {"response_ids": []}


def test_half_a_character_ends_no_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    file = folder.write_answers(1, [{"response": "a\ud800b"}])
    folder.log_event("worker_failed", 1, reason="a\ud800b")
    assert [row["response"] for row in read_json_lines(file)] == ["a?b"]
    assert folder.read_events()[0]["reason"] == "a?b"


def test_resume_forgets_what_lies_beyond_the_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start()
    for step in range(1, 6):
        folder.log_metrics(step, {"loss": step / 10})
        folder.write_answers(step, [{"prompt": "p", "response": "r"}])
        folder.log_event("checkpoint", step)
    folder.resume(3)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == [
        "step_1.jsonl",
        "step_2.jsonl",
        "step_3.jsonl",
    ]
    assert [(event["kind"], event["step"]) for event in folder.read_events()][-2:] == [("checkpoint", 3), ("resume", 3)]


def test_a_resumed_file_has_the_bytes_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, broken = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    values = [0.1 + 0.2, 1e-17, 3.0, -0.0]
    for folder in (whole, broken):
        folder.start()
        for step, value in enumerate(values):
            folder.log_metrics(step, {"x": value})
    broken.resume(1)
    for step in (2, 3):
        broken.log_metrics(step, {"x": values[step]})
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()


def test_half_a_line_at_the_end_costs_only_itself(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start()
    folder.log_metrics(1, {"x": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "x"')
    assert [line["step"] for line in folder.read_metrics()] == [1]
    folder.log_metrics(3, {"x": 3.0})
    assert [line["step"] for line in folder.read_metrics()] == [1, 3]
    folder.resume(3)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_new_run_in_an_old_folder_keeps_everything_of_the_old_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in (1, 2, 3):
        folder.write_config({"run": number})
        folder.start()
        folder.log_metrics(1, {"x": float(number)})
        folder.log_timeline(1, [("w", "gen", 0.0, 1.0, None)])
        folder.write_answers(1, [{"prompt": f"p{number}"}])
        folder.write_answers(0, [{"prompt": f"v{number}"}], "validation")
    for number, kept in ((1, tmp_path / "previous_1"), (2, tmp_path / "previous_2"), (3, tmp_path)):
        assert list(read_json_lines(kept / "metrics.jsonl")) == [{"step": 1, "x": float(number)}]
        assert list(read_json_lines(kept / "rollouts" / "step_1.jsonl")) == [{"prompt": f"p{number}"}]
        assert list(read_json_lines(kept / "validation" / "step_0.jsonl")) == [{"prompt": f"v{number}"}]
        assert (kept / "config.yaml").read_text() == f"run: {number}\n"
        assert (kept / "timeline.jsonl").exists()


def _attempt(folder: RunFolder, config: dict[str, Any]) -> None:
    folder.write_config(config)
    folder.write_plan({})


def test_a_resume_with_other_settings_shows_them_and_keeps_the_earlier_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    first = {"actor": {"lr": 1e-6, "n": 4}, "env": {"api_key": "one"}}
    _attempt(folder, first)
    folder.start()
    folder.log_metrics(1, {"x": 1.0})
    _attempt(folder, first)
    folder.resume(1)
    assert "changed" not in folder.read_events()[-1], "nothing is said of a run that is merely continued"
    _attempt(folder, {"actor": {"lr": 5.0, "n": 4}})  # an attempt that fails before its first step
    assert "lr: 1.0e-06" in folder.config_of(1).read_text(), "that of the checkpoint, not of the attempt that failed"
    _attempt(folder, {"actor": {"lr": 2e-6, "n": 4}, "env": {"api_key": "two"}})
    folder.resume(1)
    assert "actor.lr: 1e-06 -> 2e-06" in caplog.text
    assert "actor.n" not in caplog.text
    assert "two" not in caplog.text
    assert folder.read_events()[-1]["changed"]["actor.lr"] == [1e-6, 2e-6]
    _attempt(folder, {"actor": {"lr": 3e-6}})
    folder.resume(1)
    kept = [(tmp_path / f"config_until_step_1{number}.yaml").read_text() for number in ("", "_2")]
    assert ["lr: 1.0e-06" in kept[0], "lr: 2.0e-06" in kept[1]] == [True, True]
    assert not list(tmp_path.glob("before_*"))
    assert ["lr: 1.0e-06" in folder.config_of(1).read_text(), folder.config_of(2).name] == [True, "config.yaml"]
    _attempt(folder, {"actor": {"lr": 4e-6}})
    folder.start()
    assert {"config.yaml", "config_until_step_1.yaml"} <= set(os.listdir(tmp_path / "previous_1"))


def test_answers_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start()

    def rows():
        yield {"prompt": "2 + 2", "response": "4", "score": 1.0, "advantage": np.float32(0.5)}
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        folder.write_answers(1, rows())
    assert list((tmp_path / "rollouts").iterdir()) == []
    file = folder.write_answers(1, [{"prompt": "é", "advantages": np.array([0.5, np.inf])}], kind="validation")
    assert json.loads(file.read_text()) == {"prompt": "é", "advantages": [0.5, None]}


def test_the_configuration_can_be_read_back(tmp_path: Path) -> None:
    import yaml

    config = DovetailConfig(data={"train_files": ["a.parquet"]})
    folder = RunFolder(tmp_path / "deep" / "er")
    folder.start()
    folder.write_config(config.model_dump(mode="json"))
    folder.write_plan({"layouts": ({"role": "actor"},), "memory": None})
    again = DovetailConfig(**yaml.safe_load((folder.path / "config.yaml").read_text()))
    assert again == config
    assert json.loads((folder.path / "plan.json").read_text()) == {"layouts": [{"role": "actor"}], "memory": None}
    assert [name for name in os.listdir(folder.path) if name.startswith(".")] == []


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


def test_the_second_run_is_refused_by_name_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with holding(tmp_path) as process:
        before = _files(tmp_path)
        for enter in (lambda: RunLock(tmp_path).refuse_if_held(), lambda: RunLock(tmp_path).__enter__()):
            with pytest.raises(RunFolderInUse, match=rf"in use by another run .*pid {process.pid} on") as caught:
                enter()
            assert "trainer.experiment_name" in str(caught.value)
        assert _files(tmp_path) == before


def test_the_lock_goes_with_its_run(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(RunFolderInUse):
            RunLock(tmp_path).__enter__()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_is_recognised_at_once(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert (tmp_path / LOCK).exists()
        with RunLock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_dead_owner_that_nobody_has_waited_for_is_recognised(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        with RunLock(tmp_path):
            pass


@pytest.mark.parametrize(
    ("changes", "age_s", "is_held"),
    [
        ({}, 0, True),
        ({"boot_id": "an earlier boot"}, 0, False),
        ({"process_started": "another process had this pid"}, 0, False),
        ({"host": "elsewhere"}, 0, True),
        ({"host": "elsewhere"}, STALE_AFTER_S + 1, False),
        ({"pid_namespace": "pid:[1]"}, 0, True),
        ({"pid_namespace": "pid:[1]"}, STALE_AFTER_S + 1, False),
    ],
)
def test_who_counts_as_alive(changes: dict[str, str], age_s: float, is_held: bool, tmp_path: Path) -> None:
    lock = tmp_path / LOCK
    with holding(tmp_path):
        lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))
        touched = lock.stat().st_mtime - age_s
        os.utime(lock, (touched, touched))
        if is_held:
            with pytest.raises(RunFolderInUse):
                RunLock(tmp_path).__enter__()
        else:
            with RunLock(tmp_path):
                pass


def test_half_a_lock_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"owner": ')
    with RunLock(tmp_path):
        pass
