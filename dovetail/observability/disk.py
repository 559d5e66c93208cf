"""Explain a full disk: what could not be written, how much space it needs and has, and what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# No space, a full quota, and a limit on the size of one file: to a user the same thing.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


class DiskFullError(OSError):
    """Something could not be written for lack of space. `str` is the whole story; `filename` is what was written."""

    def __init__(self, path: Path, *, needed: int | None = None, advice: str = "") -> None:
        free = free_bytes(path)
        need = f"about {_size(needed)} are needed and " if needed else ""
        advice = advice or "free some space, or set trainer.default_local_dir to another disk"
        space = f"{need}{_size(free)} are free"
        self._message = f"{path} could not be written, the disk is full: {space}. Way out: {advice}."
        super().__init__(errno.ENOSPC, self._message, str(path))

    def __str__(self) -> str:
        return self._message


@contextmanager
def explaining_full_disk(path: Path, *, advice: str = "") -> Iterator[None]:
    """Turn the system's `No space left on device`, which names no file, into a `DiskFullError` that does."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFullError) or error.errno not in _FULL:
            raise
        raise DiskFullError(path, advice=advice) from error


def is_full_disk(error: BaseException) -> bool:
    """Whether `error` says, itself or as what caused it, that there was no space.

    Words count too: an error that comes from another process has lost its number.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if any(words in str(seen) for words in _FULL_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def free_bytes(path: Path) -> int:
    """Space left where `path` is, or where it would be."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
