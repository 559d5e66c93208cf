"""Trackers that live outside the run folder: TensorBoard, W&B, MLflow, Trackio, SwanLab, ClearML.

They take the numbers of each step, and some responses to validation prompts to show beside the curves. Each is imported
when a run asks for it; a missing package is an error before the first step.
"""

from __future__ import annotations

import html
import importlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

NAME = "val/generations"
"""What trackers call the table."""

COLUMNS = ("step", "input", "output", "score")
_SEED = 42


@dataclass(frozen=True)
class ShownAnswer:
    """`score` is None for an answer that could not be scored."""

    input: str
    output: str
    score: float | None


def choose_answers(rows: Sequence[Mapping[str, Any]], count: int) -> list[ShownAnswer]:
    """`count` of them, -1: all. Every validation of the same prompts chooses the same places, so responses compare."""
    places = range(len(rows)) if count < 0 else random.Random(_SEED).sample(range(len(rows)), min(count, len(rows)))
    return [ShownAnswer(rows[place]["input"], rows[place]["output"], rows[place]["score"]) for place in sorted(places)]


def table_rows(step: int, answers: Sequence[ShownAnswer]) -> list[list[Any]]:
    """A row of `COLUMNS` for each."""
    return [[step, answer.input, answer.output, answer.score] for answer in answers]


def answer_text(step: int, answer: ShownAnswer) -> str:
    """For a terminal."""
    score = "none" if answer.score is None else f"{answer.score:.4g}"
    return f"step {step}: validation answer, score {score}\n  input: {answer.input}\n  output: {answer.output}"


def markdown_table(answers: Sequence[ShownAnswer]) -> str:
    """Where a tracker has Markdown and no tables. Texts stay as they are, line breaks included."""
    rows = [[_cell(answer.input), _cell(answer.output), _score(answer.score)] for answer in answers]
    return "\n".join(f"| {' | '.join(row)} |" for row in (list(COLUMNS[1:]), ["---"] * 3, *rows))


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")


@dataclass(frozen=True)
class RunFacts:
    """What a tracker records about a run when it starts."""

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path


class Sink:
    """A tracker, or any code that wants to hear of a run as it goes on. Called on the driver, in this order.

    Override what you need; `register_tracker` gives it a name for `trainer.logger`. An exception ends the run.
    """

    def __init__(self, facts: RunFacts) -> None: ...

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        """Something beside the numbers: `validation`, `checkpoint`, `skipped_step`, ...

        `start`: a new run begins where another one was. `resume`: the run goes on after this step, and what was logged
        of later steps will happen again.
        """

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """Some responses to validation prompts (`trainer.log_val_generations`)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step that is over."""

    def close(self) -> None:
        """The run is over."""


class TensorBoardSink(Sink):
    """Event files in `<run>/tensorboard`. Uses the `tensorboard` package itself, not torch's wrapper of it."""

    def __init__(self, facts: RunFacts) -> None:
        writer = need("tensorboard.summary.writer.event_file_writer")
        self._event = need("tensorboard.compat.proto.event_pb2").Event
        self._summary = need("tensorboard.compat.proto.summary_pb2").Summary
        self._session = need("tensorboard.compat.proto.event_pb2").SessionLog
        self._writer = writer.EventFileWriter(str(facts.folder / "tensorboard"))

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if kind in ("start", "resume"):  # TensorBoard leaves out what was written before of this step and later ones
            log, first = self._session(status=self._session.START), 0 if kind == "start" else step + 1
            self._writer.add_event(self._event(step=first, wall_time=time.time(), session_log=log))
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        text = need("tensorboard.plugins.text.summary_v2")
        summary = text.text_pb(NAME, markdown_table(answers))
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _LoggingSink(Sink):
    """Libraries with W&B's calls: `Table`, and `log` and `finish` of a run or of the library itself."""

    _library: Any
    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        table = self._library.Table(columns=list(COLUMNS), data=table_rows(step, answers))
        self._run.log({NAME: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbSink(_LoggingSink):
    """A W&B run; its id is kept in the run folder, so that a resumed run continues the same curves."""

    def __init__(self, facts: RunFacts) -> None:
        self._library, self._facts = need("wandb"), facts
        self._file = facts.folder / "wandb.id"
        self._before = self._file.read_text().strip() if self._file.exists() else None
        self._open(self._before)

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if kind == "start" and self._before is not None:  # W&B would drop its steps: those of the run before are higher
            self._run.finish()
            self._open(None)

    def _open(self, run_id: str | None) -> None:
        self._run = self._library.init(
            project=self._facts.project,
            name=self._facts.experiment,
            config=dict(self._facts.config),
            dir=str(self._facts.folder),
            id=run_id,
            resume="allow",
        )
        self._file.write_text(f"{self._run.id}\n")


class MLflowSink(Sink):
    """An MLflow run at `MLFLOW_TRACKING_URI`."""

    def __init__(self, facts: RunFacts) -> None:
        self._mlflow, self._facts = need("mlflow"), facts
        self._mlflow.set_experiment(facts.project)
        self._file = facts.folder / "mlflow.id"
        self._before = self._file.read_text().strip() if self._file.exists() else None
        self._open(self._before)

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if kind == "start" and self._before is not None:  # not into the curves of the run before
            self._mlflow.end_run()
            self._open(None)

    def _open(self, run_id: str | None) -> None:
        run = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else self._facts.experiment)
        self._file.write_text(f"{run.info.run_id}\n")
        if run_id is None:
            self._mlflow.log_dict(dict(self._facts.config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow takes no "@" in names, and validation metrics are called mean@8.
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        # One table of the run: what is logged under the same name is added to it.
        columns = zip(*table_rows(step, answers), strict=True)
        self._mlflow.log_table(dict(zip(COLUMNS, map(list, columns), strict=True)), "val_generations.json")

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioSink(_LoggingSink):
    """A local Trackio project. A resumed run of the same name continues its curves."""

    def __init__(self, facts: RunFacts) -> None:
        self._library = self._run = need("trackio")
        self._library.init(facts.project, facts.experiment, config=dict(facts.config), resume="allow")


class SwanLabSink(_LoggingSink):
    """A SwanLab experiment; `SWANLAB_MODE=local` keeps it on this machine."""

    def __init__(self, facts: RunFacts) -> None:
        self._library = self._run = need("swanlab")
        self._library.init(
            project=facts.project,
            experiment_name=facts.experiment,
            config=dict(facts.config),
            logdir=str(facts.folder / "swanlab"),
        )

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        texts = [self._library.Text(answer_text(step, answer)) for answer in answers]
        self._run.log({NAME: texts}, step=step)


class ClearMLSink(Sink):
    """A ClearML task; the part of a name before the first slash is the plot, the rest the curve."""

    def __init__(self, facts: RunFacts) -> None:
        clearml = need("clearml")
        # 0 and not True, which would add the steps of the task so far to those that a resumed run reports.
        self._task = clearml.Task.init(
            project_name=facts.project, task_name=facts.experiment, continue_last_task=0, output_uri=False
        )
        self._task.connect_configuration(dict(facts.config), name="config")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            plot, _, curve = name.partition("/")
            self._task.get_logger().report_scalar(plot, curve or plot, value, step)

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        table = [list(COLUMNS), *table_rows(step, answers)]
        plot, _, series = NAME.partition("/")
        self._task.get_logger().report_table(plot, series, iteration=step, table_plot=table)

    def close(self) -> None:
        self._task.close()


_Sink = TypeVar("_Sink", bound=Sink)
SINKS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MLflowSink,
    "trackio": TrackioSink,
    "swanlab": SwanLabSink,
    "clearml": ClearMLSink,
}


def register_tracker(name: str) -> Callable[[type[_Sink]], type[_Sink]]:
    """Make `trainer.logger=[console,<name>]` open the class. Put the module into `trainer.import_modules`."""

    def add(sink: type[_Sink]) -> type[_Sink]:
        if name in SINKS and SINKS[name].__qualname__ != sink.__qualname__:
            raise ValueError(f"a tracker named {name!r} is already registered ({SINKS[name]}); choose another name.")
        SINKS[name] = sink
        return sink

    return add


def open_sinks(names: Sequence[str], facts: RunFacts) -> list[Sink]:
    """Open them in order; when one cannot be opened, close those before it."""
    opened: list[Sink] = []
    try:
        for name in names:
            opened.append(SINKS[name](facts))
    except BaseException:
        for sink in opened:
            sink.close()
        raise
    return opened


class MissingTrackerError(ImportError):
    """A tracker in `trainer.logger` whose library is not installed."""


def need(module: str) -> Any:
    """Import a module of a tracker's library, which has the tracker's name, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingTrackerError(
            f"trainer.logger={name} needs the package {name}: {error}. "
            f"pip install {name}, or take {name} out of trainer.logger."
        ) from error
