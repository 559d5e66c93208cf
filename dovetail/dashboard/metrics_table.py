"""`metrics.jsonl` as columns of numbers: 8 bytes for each, filled in as the file grows. Draws nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.dashboard.growing_file import GrowingFile

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
            if line.value is None or not isinstance(line.value.get("step"), int):
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
            number = NOT_FINITE if value is None else value
            missing = index - len(column)
            if missing == 0:  # nearly always: kept free of anything that takes time
                column.append(number)
                continue
            column.extend([_ABSENT] * (missing + 1))
            column[index] = number
