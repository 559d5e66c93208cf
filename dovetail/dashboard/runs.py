"""Run folders: which there are below the given roots, and one `Run` to read each. Opens no file outside the roots."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dovetail.dashboard.async_view import is_asynchronous
from dovetail.dashboard.config_view import read_config
from dovetail.dashboard.health import Facts, check_health
from dovetail.dashboard.responses import Kind, ResponseFolder, counts
from dovetail.dashboard.run_files import DashboardError, EventLog, MetricsTable, read_object, run_state
from dovetail.dashboard.step_times import Timelines, memory_view, phase_words
from dovetail.observability.run_folder import EVENTS, METRICS, NOW, TIMELINE

_MARKS = ("metrics.jsonl", "config.yaml")
_DEPTH = 3
_MOST_RUNS = 200


class Run:
    """One run folder. Every reader below keeps what it has read and takes in only what is new."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.metrics = MetricsTable(folder / METRICS)
        self.events = EventLog(folder / EVENTS)
        self.timelines = Timelines(folder / TIMELINE)
        self._config: tuple[int, dict[str, Any]] | None = None
        self._responses = {kind: ResponseFolder(folder / kind, self.resolve) for kind in ("rollouts", "validation")}

    def refresh(self) -> None:
        """Take in what was written since the last time."""
        if not self.folder.is_dir():
            raise DashboardError(f"the folder of run {self.name} is gone: {self.folder}", status=410)
        for name in (METRICS, EVENTS, TIMELINE):
            if (self.folder / name).exists():
                self.resolve(self.folder / name)
        self.metrics.refresh()
        self.events.refresh()
        self.timelines.refresh()
        self.timelines.resumed_after = [event["step"] for event in self.events.events if event.get("kind") == "resume"]

    def resolve(self, path: Path) -> Path:
        """The path itself, unless it leads (by a link) out of the run folder."""
        target = path.resolve()
        if not target.is_relative_to(self.folder.resolve()):
            raise DashboardError(f"{path.name} leads out of the run folder and is not read.", status=403)
        return target

    def responses(self, kind: Kind) -> ResponseFolder:
        return self._responses[kind]

    def stamp(self) -> str:
        """Changes when something in the folder does; asks the file system a few times and reads nothing."""
        names = (METRICS, EVENTS, TIMELINE, NOW, "rollouts", "validation")
        return "-".join(str(_changed(self.folder / name)) for name in names)

    def config(self) -> dict[str, Any]:
        file = self.resolve(self.folder / "config.yaml")
        if self._config is None or self._config[0] != _changed(file):
            self._config = (_changed(file), read_config(file))
        return self._config[1]

    def settings(self) -> dict[str, Any]:
        """The same; nothing of a run that has none, or none that can be read."""
        try:
            return self.config()
        except DashboardError:
            return {}

    def memory(self) -> dict[str, Any]:
        plan = read_object(self.resolve(self.folder / "plan.json"))
        return memory_view(plan, self.timelines.peaks, self.metrics)

    def status(self) -> dict[str, Any]:
        """Name, state, steps and what is happening now."""
        now = read_object(self.folder / NOW)
        last = self.metrics.last_step
        # A run that only validates says that it has no steps to make: null.
        total = now["total_steps"] if "total_steps" in now else self.settings().get("trainer.total_training_steps")
        total = total if isinstance(total, int) else None
        changed = max(_changed(self.folder / name) for name in (METRICS, EVENTS, NOW, "config.yaml")) / 1e9
        state = run_state(now, last, total, changed)
        status: dict[str, Any] = {"name": self.name, "state": state, "step": last}
        status |= {"total_steps": total, "changed": changed}
        if state == "running" and isinstance(now.get("phase"), str):
            words = phase_words(self.timelines)
            status |= {
                "phase": words.get(now["phase"], now["phase"].replace("_", " ")),
                "phase_since": now.get("since", now.get("time")),
                "now_step": now.get("step"),
                "waits": str(now.get("waits", "")),
            }
        status["message"] = (self.failed() if state == "stopped" else "") or self._message(state, last)
        status["views"] = ["async"] if is_asynchronous(self.metrics) else []
        status["bad_lines"] = self.metrics.bad_lines
        return status

    def health(self) -> list[dict[str, Any]]:
        """Warnings about this run."""
        status = self.status()
        stopped = None
        on_request = read_object(self.folder / NOW).get("stopped") is True
        if status["state"] == "stopped" and not on_request and (status["step"] or 0) < (status["total_steps"] or 0):
            stopped = f"The last step is {status['step'] or 0} of {status['total_steps']}"
            stopped += f". {failed}" if (failed := self.failed()) else ", and its process is gone."
        return check_health(Facts(self.metrics, self._no_signal(), self.memory(), stopped))

    def failed(self) -> str:
        """What ended the run, in its own words; empty where it could say nothing."""
        failed = read_object(self.folder / NOW).get("failed")
        return failed if isinstance(failed, str) else ""

    def _no_signal(self) -> float | None:
        """Share of groups without signal in the newest responses of training."""
        steps = self.responses("rollouts").steps()
        if not steps:
            return None
        try:
            sums = counts(self.responses("rollouts").file(steps[-1]).entries)
        except DashboardError:
            return None
        several = sums["all"] > sums["groups"]
        return sums["groups_without_signal"] / sums["groups"] if several and sums["groups"] else None

    def _message(self, state: str, last: int | None) -> str | None:
        if state == "created" and not (self.folder / "config.yaml").exists():
            return "The folder is empty so far: the run is still being created."
        if last is None and not (self.folder / METRICS).exists():
            return "No step is finished yet; metrics.jsonl appears with the first one."
        if self.metrics.bad_lines:
            return f"{self.metrics.bad_lines} lines of metrics.jsonl are not whole JSON objects and are left out."
        return None


class Runs:
    """The runs below the roots, by name. New ones are found when asked again."""

    def __init__(self, roots: Sequence[str | os.PathLike[str]]) -> None:
        self._roots = [Path(root).expanduser().absolute() for root in roots]
        self._runs: dict[str, Run] = {}
        self.num_not_listed = 0
        """Run folders beyond the most that are listed."""
        problems = [problem for root in self._roots if (problem := _problem(root))]
        if problems:
            raise DashboardError("\n".join(problems))
        self.find()

    def find(self) -> list[Run]:
        """The runs, those given first, in the order of the roots; `_MOST_RUNS` at most."""
        known = {run.folder for run in self._runs.values()}
        beyond = set()
        for root in self._roots:
            for folder in _run_folders(root):
                if folder in known:
                    continue
                if len(self._runs) == _MOST_RUNS:
                    beyond.add(folder)
                    continue
                run = Run(self._free_name(folder, root), folder)
                self._runs[run.name] = run
                known.add(folder)
        self.num_not_listed = len(beyond)
        return list(self._runs.values())

    def get(self, name: str) -> Run:
        """A run by its name, freshly read. Names are looked up, never used as paths."""
        run = self._runs.get(name)
        if run is None:
            raise DashboardError(f"there is no run {name[:100]!r} here; there are {', '.join(self._runs) or 'none'}.")
        run.refresh()
        return run

    def _free_name(self, folder: Path, root: Path) -> str:
        name = folder.name if folder == root else str(folder.relative_to(root))
        candidates = (name, f"{folder.parent.name}/{folder.name}", *(f"{name} ({count})" for count in range(2, 999)))
        return next(candidate for candidate in candidates if candidate not in self._runs)


def _problem(root: Path) -> str | None:
    if not root.exists():
        return f"{root}: there is no such folder."
    if not root.is_dir():
        return f"{root}: is a file; give the run folder, the one with metrics.jsonl in it."
    if any(root.iterdir()) and not any(True for _ in _run_folders(root)):
        return (
            f"{root}: is no run folder. It holds neither {' nor '.join(_MARKS)}, and no folder in it does. A run's "
            "folder is trainer.default_local_dir, by default runs/<project>/<experiment>."
        )
    return None


def _run_folders(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """The root itself when it is a run or empty (a run being created), else the runs below it."""
    if any((root / mark).is_file() for mark in _MARKS):
        yield root
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
        is_empty = not inside and not any(root.iterdir())
    except OSError:
        return
    if is_empty and depth == _DEPTH:
        yield root
    elif depth:
        for name in inside:
            if not name.startswith("."):
                yield from _run_folders(root / name, depth - 1)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
