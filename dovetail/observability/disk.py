"""Explain what cannot be written: a path that the user may not write, known before a run; a full disk, with the space
that it needs and has, and what to do. `replacing` leaves no half file; `flush_to_disk` and `write_text_atomically` make
what was written survive a power cut."""

from __future__ import annotations

import errno
import os
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
    except Exception as error:  # safetensors has one of its own
        if isinstance(error, DiskFullError) or not is_full_disk(error):
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
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def flush_to_disk(path: Path) -> None:
    """What a file holds, or the names in a folder: after this they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old or the new text, never half, even after a power cut."""
    with replacing(path) as partial:
        partial.write_text(text)
        flush_to_disk(partial)
    flush_to_disk(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what replaces `path` at the end: a reader sees the old file or the new one, never half."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def make_readable(folder: Path) -> None:
    """Let others read it: temporary folders and the files of safetensors are private."""
    folder.chmod(0o755)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def why_not_writable(path: Path, *, is_folder: bool) -> str | None:
    """What keeps this user from writing `path`, which need not be there, nor the folders above it. Writes nothing."""
    if path.exists() and path.is_dir() != is_folder:
        return "it is a file, not a folder" if is_folder else "it is a folder, not a file"
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.exists():
        return f"{place} is a link to nothing"
    if place != path.absolute() and not place.is_dir():
        return f"{place} is not a folder"
    return None if os.access(place, os.W_OK) else f"you may not write to {place}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
