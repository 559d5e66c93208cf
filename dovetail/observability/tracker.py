"""`Tracker`: takes the numbers of a step and passes them to the run folder, the console and the sinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dovetail.config.wording import did_you_mean
from dovetail.observability.console import StepConsole
from dovetail.observability.run_folder import RunFolder
from dovetail.observability.sinks import SINKS, RunFacts, ShownAnswer, Sink, open_sinks
from dovetail.observability.waits import waiting

# The run folder's metrics.jsonl is always written; these names say so out loud.
_ALWAYS = ("file", "jsonl")
_SLOW_S = 60.0
"""Trackers may call servers; one that takes longer is named in the log."""


class Tracker:
    """`trainer.logger` as an object. Without `console` among the names nothing is shown."""

    def __init__(
        self,
        names: Sequence[str],
        folder: RunFolder,
        *,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        console: StepConsole | None = None,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
    ) -> None:
        check_logger_names(names)
        self._on_step = on_step
        self.folder = folder
        self._console = console if "console" in names else None
        facts = RunFacts(project, experiment, config, folder.path)
        self._sinks = open_sinks([name for name in dict.fromkeys(names) if name in SINKS], facts)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step. Sinks get the finite numbers, the run folder everything."""
        self.folder.log_metrics(step, metrics)
        numbers = finite_numbers(metrics)
        if self._console is not None:
            self._console.end_step(step, numbers)
        self._tell(lambda sink: sink.log(step, numbers))
        if self._on_step is not None and step > 0:  # 0 is a validation before the first step
            self._on_step(step, numbers)

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """Record something that happened beside the numbers."""
        self.folder.log_event(kind, step, **facts)
        if self._console is not None:
            self._console.event(kind, step, facts)
        self._tell(lambda sink: sink.event(kind, step, facts))

    def show_wait(self, words: str) -> None:
        """Who waits for whom right now, to the console."""
        if self._console is not None:
            self._console.wait(words)

    def show_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """To the sinks, as a table; without one to the console. The run folder has every answer anyway."""
        self._tell(lambda sink: sink.show_answers(step, answers))
        if self._console is not None and not self._sinks:
            self._console.answers(step, answers)

    def start(self, *checkpoints: Path) -> None:
        """Begin a run from step 0. `checkpoints`: see `RunFolder.start`."""
        if self.folder.start(*checkpoints):
            self._tell(lambda sink: sink.event("start", 0, {}))

    def resume(self, step: int, *checkpoints: Path) -> None:
        """Continue after `step`: files and console go back to it. `checkpoints`: see `RunFolder.resume`."""
        self.folder.resume(step, *checkpoints)
        if self._console is not None:
            self._console.event("resume", step, {})
        self._tell(lambda sink: sink.event("resume", step, {}))

    def close(self) -> None:
        """Flush and leave the trackers; the console shows its last state."""
        if self._console is not None:
            self._console.close()
        self._tell(lambda sink: sink.close())

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            with waiting("the driver", f"the tracker {type(sink).__name__}", limit_s=_SLOW_S):
                what(sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_logger_names(names: Sequence[str]) -> None:
    """Raise for a name in `trainer.logger` that is no tracker."""
    known = ("console", *_ALWAYS, *SINKS)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"trainer.logger={name} is not known.{hint} There are {', '.join(known)}.")


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers, as floats."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, str) or not hasattr(value, "__float__"):
            continue
        number = float(value)
        if math.isfinite(number):
            numbers[name] = number
    return numbers
