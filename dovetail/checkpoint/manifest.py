"""The list of files that makes a checkpoint folder whole. Written last; a folder without it is not a checkpoint.

Sizes are recorded for every file, checksums for small ones: hashing a terabyte of shards would cost more than the
truncation it guards against, and the storage library already fails on a shard it cannot parse.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
MAX_HASHED_BYTES = 1 << 20


class BrokenCheckpoint(RuntimeError):
    """A folder that looks like a checkpoint and is not whole. The message names the folder and what is wrong."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder} cannot be used: {reason}")
        self.folder = folder
        self.reason = reason


@dataclass(frozen=True)
class FileRecord:
    """One file of the folder; ``sha256`` is empty for files above ``MAX_HASHED_BYTES``."""

    size: int
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """Everything needed to decide whether a folder is whole, before any tensor is read."""

    step: int
    world_size: int
    files: dict[str, FileRecord]
    extra: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def write_manifest(folder: Path, *, step: int, world_size: int, extra: Mapping[str, Any] | None = None) -> Manifest:
    """Record every file now in ``folder``. Files are flushed to the disk first, so the manifest never promises more."""
    records: dict[str, FileRecord] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST_NAME:
            _flush(path)
            records[path.relative_to(folder).as_posix()] = _record(path)
    manifest = Manifest(step=step, world_size=world_size, files=records, extra=dict(extra or {}))
    write_text_atomically(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1, sort_keys=True))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Parse the manifest, or say why the folder is not a checkpoint. Files are not looked at."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise BrokenCheckpoint(folder, f"it has no {MANIFEST_NAME} (an interrupted save?)")
    try:
        raw = json.loads(path.read_text())
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        manifest = Manifest(
            step=int(raw["step"]),
            world_size=int(raw["world_size"]),
            files=files,
            extra=raw["extra"],
            format_version=int(raw["format_version"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(folder, f"{MANIFEST_NAME} is not readable ({error})") from error
    if manifest.format_version > FORMAT_VERSION:
        raise BrokenCheckpoint(
            folder, f"it has format version {manifest.format_version}, this program reads up to {FORMAT_VERSION}"
        )
    return manifest


def verify_folder(folder: Path) -> Manifest:
    """Return the manifest of a whole folder; raise ``BrokenCheckpoint`` naming the first file that is wrong."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BrokenCheckpoint(folder, f"file {name} is missing")
        size = path.stat().st_size
        if size != expected.size:
            raise BrokenCheckpoint(folder, f"file {name} has {size} bytes instead of {expected.size}")
        if expected.sha256 and _sha256(path) != expected.sha256:
            raise BrokenCheckpoint(folder, f"file {name} has changed since it was saved (checksum differs)")
    return manifest


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old or the new text, never half, even after a power cut."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _record(path: Path) -> FileRecord:
    size = path.stat().st_size
    return FileRecord(size, _sha256(path) if size <= MAX_HASHED_BYTES else "")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
