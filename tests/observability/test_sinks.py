"""Trackers get every number under its name and step, by their documented calls; TensorBoard is in `test_tensorboard`.

W&B, MLflow, Trackio, SwanLab and ClearML are stood in for by modules that accept exactly the calls their documentation
has; anything else is an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dovetail.observability.run_folder import RunFolder
from dovetail.observability.sinks import ShownAnswer, answer_text
from dovetail.observability.tracker import Tracker

pytestmark = pytest.mark.unit

STEPS = [
    (1, {"critic/score/mean": 0.25, "actor/grad_norm": 1.5}),
    (2, {"critic/score/mean": 0.5, "val-core/openai/gsm8k/acc/mean@8": 0.75}),
]
CONFIG = {"trainer": {"seed": 1}, "data": {"train_files": ["a.parquet"]}}


def log_steps(name: str, folder: Path) -> None:
    run = RunFolder(folder)
    run.start()
    with Tracker([name], run, project="project", experiment="experiment", config=CONFIG) as tracker:
        for step, metrics in STEPS:
            tracker.log(step, metrics)


ANSWERS = [ShownAnswer("2 + 2", "4", 1.0), ShownAnswer("3 + 3", "5\n", None)]
ROWS = [[2, "2 + 2", "4", 1.0], [2, "3 + 3", "5\n", None]]
COLUMNS = ["step", "input", "output", "score"]


def show_answers(name: str, folder: Path) -> None:
    run = RunFolder(folder)
    run.start()
    with Tracker([name], run, project="project", experiment="experiment", config=CONFIG) as tracker:
        tracker.show_answers(2, ANSWERS)


# ---- the others, by their documented calls ----


@dataclass
class Calls:
    """What a stand-in was told."""

    opened: list[dict[str, Any]] = field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    tables: list[tuple[int, str, Any]] = field(default_factory=list)
    closed: int = 0

    def close(self) -> None:
        assert self.closed < len(self.opened), "closed more often than opened"
        self.closed += 1

    def log(self, metrics: dict[str, float], step: int) -> None:
        assert type(step) is int
        if "val/generations" in metrics:
            ((name, table),) = metrics.items()
            self.tables.append((step, name, table))
            return
        assert all(type(value) is float for value in metrics.values())
        self.logged.append((step, metrics))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins in the place of the libraries, whether they are installed or not."""
    calls = Calls()
    for name, make in {"wandb": wandb, "mlflow": mlflow, "trackio": trackio, "swanlab": swanlab}.items():
        module = ModuleType(name)
        vars(module).update(make(calls))
        monkeypatch.setitem(sys.modules, name, module)
    module = ModuleType("clearml")
    vars(module).update(Task=clearml_task(calls))
    monkeypatch.setitem(sys.modules, "clearml", module)
    return calls


def wandb(calls: Calls) -> dict[str, Any]:
    def init(
        *, project: str, name: str, config: dict[str, Any], dir: str, id: str | None, resume: str
    ) -> SimpleNamespace:
        assert resume in ("allow", "must", "never", "auto")
        calls.opened.append({"project": project, "name": name, "config": config, "dir": dir, "id": id})

        def log(data: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            calls.log(data, step)

        return SimpleNamespace(id=id or "made-id", log=log, finish=calls.close)

    return {"init": init, "Table": make_table}


def make_table(*, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    assert all(len(row) == len(columns) for row in data)
    return columns, data


def mlflow(calls: Calls) -> dict[str, Any]:
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. :/")

    def set_experiment(experiment_name: str) -> None:
        calls.files["experiment"] = experiment_name

    def start_run(run_id: str | None = None, *, run_name: str | None = None) -> SimpleNamespace:
        assert (run_id is None) != (run_name is None)
        calls.opened.append({"id": run_id, "name": run_name})
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "made-id"))

    def log_dict(dictionary: dict[str, Any], artifact_file: str) -> None:
        calls.files[artifact_file] = dictionary

    def log_table(data: dict[str, list[Any]], artifact_file: str) -> None:
        assert artifact_file.endswith((".json", ".parquet")), "what MLflow keeps tables in"
        calls.files[artifact_file] = data

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        # https://mlflow.org: names hold letters, digits, underscores, dashes, periods, spaces, colons and slashes.
        assert all(set(name) <= allowed for name in metrics), f"a name MLflow refuses in {list(metrics)}"
        calls.log(metrics, step)

    return {
        "set_experiment": set_experiment, "start_run": start_run, "log_dict": log_dict, "log_metrics": log_metrics,
        "end_run": calls.close, "log_table": log_table,
    }  # fmt: skip


def trackio(calls: Calls) -> dict[str, Any]:
    def init(project: str, name: str | None = None, *, config: dict[str, Any] | None = None, resume: str) -> None:
        assert resume in ("must", "allow", "never")
        calls.opened.append({"project": project, "name": name, "config": config})

    def log(metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        calls.log(metrics, step)

    return {"init": init, "log": log, "finish": calls.close, "Table": make_table}


def swanlab(calls: Calls) -> dict[str, Any]:
    def init(*, project: str, experiment_name: str, config: dict[str, Any], logdir: str) -> None:
        calls.opened.append({"project": project, "name": experiment_name, "config": config})

    def log(data: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        calls.log(data, step)

    def text(data: str, caption: str | None = None) -> str:
        return data

    return {"init": init, "log": log, "finish": calls.close, "Text": text}


def clearml_task(calls: Calls) -> type:
    class Task:
        @classmethod
        def init(
            cls, *, project_name: str, task_name: str, continue_last_task: bool | int, output_uri: bool | None
        ) -> Task:
            assert continue_last_task is not True, "ClearML would count the steps on from those of the task so far"
            calls.opened.append({"project": project_name, "name": task_name})
            return cls()

        def connect_configuration(self, configuration: dict[str, Any], name: str) -> None:
            calls.files[name] = configuration

        def get_logger(self) -> SimpleNamespace:
            def report_scalar(title: str, series: str, value: float, iteration: int) -> None:
                calls.log({f"{title}/{series}": value}, iteration)

            def report_table(title: str, series: str, iteration: int, table_plot: list[list[Any]]) -> None:
                calls.tables.append((iteration, f"{title}/{series}", table_plot))

            return SimpleNamespace(report_scalar=report_scalar, report_table=report_table)

        def close(self) -> None:
            calls.close()

    return Task


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_every_number_arrives_with_its_step_and_the_run_is_closed(tmp_path: Path, calls: Calls, name: str) -> None:
    log_steps(name, tmp_path)
    assert calls.logged == STEPS
    assert calls.opened[0]["project"] == "project"
    assert calls.opened[0]["name"] == "experiment"
    assert calls.opened[0]["config"] == CONFIG
    assert calls.closed == 1


def test_mlflow_gets_names_it_accepts_and_the_configuration_once(tmp_path: Path, calls: Calls) -> None:
    log_steps("mlflow", tmp_path)
    assert calls.logged[1] == (2, {"critic/score/mean": 0.5, "val-core/openai/gsm8k/acc/mean_at_8": 0.75})
    assert calls.files == {"experiment": "project", "config.json": CONFIG}
    calls.files.clear()
    log_steps("mlflow", tmp_path)
    assert [run["id"] for run in calls.opened] == [None, "made-id"]
    assert "config.json" not in calls.files


def test_clearml_gets_a_plot_and_a_curve(tmp_path: Path, calls: Calls) -> None:
    log_steps("clearml", tmp_path)
    assert calls.logged[:2] == [(1, {"critic/score/mean": 0.25}), (1, {"actor/grad_norm": 1.5})]
    assert calls.files == {"config": CONFIG}
    assert calls.closed == 1


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path: Path, calls: Calls) -> None:
    log_steps("wandb", tmp_path)
    log_steps("wandb", tmp_path)
    assert [run["id"] for run in calls.opened] == [None, "made-id"]
    assert calls.closed == 2


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_new_run_in_a_used_folder_is_a_new_run_of_the_tracker(tmp_path: Path, calls: Calls, name: str) -> None:
    """W&B drops steps below those it has, which were all steps of the new run."""
    log_steps(name, tmp_path)
    with Tracker([name], RunFolder(tmp_path), project="project", experiment="experiment", config=CONFIG) as tracker:
        tracker.start()
        tracker.log(1, {"x": 1.0})
    assert [run["id"] for run in calls.opened] == [None, "made-id", None]
    assert calls.closed == 3


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("wandb", (COLUMNS, ROWS)),
        ("trackio", (COLUMNS, ROWS)),
        ("swanlab", [answer_text(2, answer) for answer in ANSWERS]),
        ("clearml", [COLUMNS, *ROWS]),
    ],
)
def test_answers_arrive_as_what_the_tracker_shows_texts_in(
    tmp_path: Path, calls: Calls, name: str, table: object
) -> None:
    show_answers(name, tmp_path)
    assert calls.tables == [(2, "val/generations", table)]


def test_mlflow_gets_the_answers_as_columns_of_one_table(tmp_path: Path, calls: Calls) -> None:
    show_answers("mlflow", tmp_path)
    columns = {name: [row[place] for row in ROWS] for place, name in enumerate(COLUMNS)}
    assert calls.files["val_generations.json"] == columns
