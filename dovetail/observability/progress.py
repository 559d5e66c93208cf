"""How far the call under way in this process has come: a count, which another process of the machine can read.

A call past its limit is hung only if the count stands still (`controller.hangs`). Engines and backends count what they
compute; it need not be even, and means nothing else.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_SIZE = 8


class _Counter:
    def __init__(self) -> None:
        self.value = 0
        self._shared: mmap.mmap | None = None

    def set(self, value: int) -> None:
        self.value = value
        if self._shared is not None:
            self._shared[:] = value.to_bytes(_SIZE, "little")

    def share(self) -> int | None:
        if not hasattr(os, "memfd_create"):
            return None
        file = os.memfd_create("dovetail-progress")
        os.ftruncate(file, _SIZE)
        self._shared = mmap.mmap(file, _SIZE)
        return file


_COUNTER = _Counter()


def note_progress() -> None:
    """Something was computed: a token, a micro-batch."""
    _COUNTER.set(_COUNTER.value + 1)


def restart_progress() -> None:
    """A call begins."""
    _COUNTER.set(0)


def progress() -> int:
    """Of this process."""
    return _COUNTER.value


def share_progress() -> int | None:
    """In a worker: the file of this process with its count (Linux)."""
    return _COUNTER.share()


def read_progress(pid: int, file: int | None) -> int:
    """Of a process of this machine that has called `share_progress`; 0 where it cannot be read."""
    try:
        return 0 if file is None else int.from_bytes(Path(f"/proc/{pid}/fd/{file}").read_bytes(), "little")
    except OSError:
        return 0
