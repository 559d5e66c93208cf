"""Files of a run that are still being written: metrics as columns of numbers, events, and what is happening now.

Reads only what is new, and only whole lines; keeps no line. Draws nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json


class DashboardError(Exception):
    """A message for people. `status` is the HTTP answer it becomes; the page shows the message alone."""

    def __init__(self, message: str, *, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


_CHUNK = 4 * 1024 * 1024
_TAIL = 256


@dataclass(frozen=True)
class Line:
    """Where a line is and what it says; `value` is None when it is no JSON object."""

    offset: int
    size: int
    value: dict[str, Any] | None


class GrowingFile:
    """Remembers how far it has read. A file that was replaced or cut (a resumed run does that) is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._tail = b""

    def was_replaced(self) -> bool:
        """Whether what was read is no longer what the file begins with. Call before `new_lines`; then forget it all."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._tail)))
                same = file.read(len(self._tail)) == self._tail
        except OSError:
            same = self._offset == 0
        if same:
            return False
        self._offset, self._tail = 0, b""
        return True

    def new_lines(self) -> Iterator[Line]:
        """Whole lines since the last time. Half a line at the end is left for later."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    start = self._offset
                    self._offset += len(line) + 1
                    if line.strip():
                        yield Line(start, len(line), parse_object(line))
                if lines:
                    self._tail = (self._tail + b"\n".join(lines) + b"\n")[-_TAIL:]


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, or None."""
    for parse in (from_json, _with_half_surrogates):
        with suppress(ValueError):
            value = parse(line)
            return value if isinstance(value, dict) else None
    return None


def _with_half_surrogates(line: bytes) -> Any:
    """A quarter as fast. A model may write half a surrogate, which no answer of the server can hold: it becomes `?`."""
    return json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty when there is none."""
    try:
        return parse_object(file.read_bytes()) or {}
    except OSError:
        return {}


def read_at(path: Path, offset: int, size: int) -> bytes:
    """A part of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, size, offset)
    finally:
        os.close(handle)


_ABSENT = float("nan")
# A null in the file: the number was not finite. Kept apart from a number that was never written.
NOT_FINITE = float("inf")
# Something else than a run's metrics could name its keys without end.
_MOST_NAMES = 2000


class MetricsTable:
    """Call `refresh` before reading. `bad_lines` counts lines that are no JSON objects."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self.bad_lines = 0
        self.version = 0

    def refresh(self) -> None:
        """Take in what was written since the last time."""
        if self._file.was_replaced():
            self._steps, self._columns, self.bad_lines = array("q"), {}, 0
            self.version += 1
        for line in self._file.new_lines():
            if line.value is None or not _is_step(line.value.get("step")):
                self.bad_lines += 1
                continue
            self._add(line.value)
            self.version += 1

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    @property
    def last_step(self) -> int | None:
        return self._steps[-1] if self._steps else None

    @property
    def steps(self) -> np.ndarray:
        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str) -> np.ndarray:
        """One number per step: NaN where it was not written, infinity where it was not finite."""
        numbers = self._columns.get(name)
        padded = np.full(len(self._steps), _ABSENT)
        if numbers is not None:
            padded[: len(numbers)] = numbers
        return padded

    def finite(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values where there is a finite number."""
        values = self.column(name)
        kept = np.isfinite(values)
        return self.steps[kept], values[kept]

    def latest(self, name: str) -> float | None:
        """The last finite number."""
        _, values = self.finite(name)
        return float(values[-1]) if len(values) else None

    def _add(self, row: dict[str, Any]) -> None:
        step = row["step"]
        if self._steps and step <= self._steps[-1]:
            index = bisect_left(self._steps, step)
            if self._steps[index] != step:
                self.bad_lines += 1
                return
        else:
            index = len(self._steps)
            self._steps.append(step)
        for name, value in row.items():
            if name == "step" or not (value is None or isinstance(value, (int, float))):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= _MOST_NAMES:
                    continue
                column = self._columns[name] = array("d")
            number = NOT_FINITE if value is None or abs(value) > sys.float_info.max else value
            missing = index - len(column)
            if missing == 0:  # nearly always: kept free of anything that takes time
                column.append(number)
                continue
            column.extend([_ABSENT] * (missing + 1))
            column[index] = number


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 2**63


State = Literal["created", "running", "finished", "stopped"]
_MOST_EVENTS = 20_000
_USUAL = ("validation", "checkpoint", "reward_failed")
# Without word of the process itself: a run that has written nothing for this long is taken to have ended.
_QUIET_S = 30 * 60


class EventLog:
    """Call `refresh` before reading."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.events: list[dict[str, Any]] = []

    def refresh(self) -> None:
        if self._file.was_replaced():
            self.events = []
        for line in self._file.new_lines():
            if line.value is not None and isinstance(line.value.get("step"), int):
                self.events.append(line.value)
        del self.events[:-_MOST_EVENTS]

    def marks(self, most: int = 400) -> list[dict[str, Any]]:
        """Kind, step and a few words of each event; of very many, evenly spaced ones and every unusual one."""
        is_usual = [event.get("kind") in _USUAL for event in self.events]
        stride = -(-sum(is_usual) // most) or 1
        kept, seen = [], 0
        for event, usual in zip(self.events, is_usual, strict=True):
            if not usual or seen % stride == 0:
                kept.append(_mark(event))
            seen += usual
        return kept[-2 * most :]


def _mark(event: dict[str, Any]) -> dict[str, Any]:
    # `best@4`, not verl's `best@4/mean` beside it.
    named = {
        name: value for name, value in event.items() if name.startswith("val-core/") and "@" in name.rpartition("/")[2]
    }
    facts = [f"{name} {value:.4g}" for name, value in named.items() if isinstance(value, (int, float))]
    changed = event.get("changed")
    if isinstance(changed, dict):  # of a resume: settings that are others than before
        pairs = {name: pair for name, pair in changed.items() if isinstance(pair, list) and len(pair) == 2}
        facts += [f"{name} {old} -> {new}" for name, (old, new) in pairs.items()]
    return {"kind": str(event.get("kind", "event")), "step": event["step"], "text": ", ".join(facts[:4])}


def run_state(now: dict[str, Any], last_step: int | None, total_steps: int | None, changed: float) -> State:
    """Whether a run goes on: by its own last word, by its steps, by its process, and else by `changed`, when its folder
    was last written to."""
    if last_step is None and not now:
        return "created"
    if now.get("finished") is True:
        return "finished"
    if now.get("stopped") is True or isinstance(now.get("failed"), str):  # its process may live on: a notebook
        return "stopped"
    if last_step is not None and total_steps is not None and last_step >= total_steps and now.get("phase") is None:
        return "finished"
    if now.get("host") == socket.gethostname() and isinstance(now.get("pid"), int) and now["pid"] > 0:
        return "running" if _is_alive(now["pid"]) else "stopped"
    return "running" if time.time() - changed < _QUIET_S else "stopped"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
