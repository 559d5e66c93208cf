"""Read a file of JSON lines that is still being written: only what is new, only whole lines. Keeps no line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

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
    try:
        value = from_json(line)  # four times as fast as the standard library's
    except ValueError:
        value = _parse_leniently(line)
    return value if isinstance(value, dict) else None


def _parse_leniently(line: bytes) -> Any:
    """The standard library's reader takes half surrogates, which a model may write."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_at(path: Path, offset: int, size: int) -> bytes:
    """A part of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, size, offset)
    finally:
        os.close(handle)
