"""The list of files that makes a checkpoint folder complete. Written last; a folder without it is not a checkpoint.

Every rank lists the files that it wrote in `part_<rank>.json`, with size and SHA-256: ranks hash in parallel, each what
it has just written. The manifest joins the parts. It is not written when the part of a rank is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dovetail.observability.disk import flush_to_disk, write_text_atomically

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
_CHUNK_BYTES = 1 << 22
# hashlib lets other threads run while it hashes. More threads than this wait for the disk.
_MAX_THREADS = 16
# Files of one rank: torch's shards, random state, the list of a part.
_OF_RANK = re.compile(r"(?:__|rng_|part_)(\d+)[_.]")


class BrokenCheckpoint(RuntimeError):
    """A folder that looks like a checkpoint and cannot be continued from. The message names the folder and the reason.

    `damaged`: it is not what was saved, so an older one is worth a try; else it does not fit this run.
    """

    def __init__(self, folder: Path, reason: str, *, damaged: bool = False) -> None:
        super().__init__(f"checkpoint {folder} cannot be used: {reason}")
        self.folder = folder
        self.reason = reason
        self.damaged = damaged

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.folder, self.reason, self.damaged)


def _rebuild(folder: Path, reason: str, damaged: bool) -> BrokenCheckpoint:
    return BrokenCheckpoint(folder, reason, damaged=damaged)


@dataclass(frozen=True)
class FileRecord:
    """One file of the folder. ``sha256`` is empty for large files of format version 1."""

    size: int
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """Everything needed to decide whether a folder is complete, before any tensor is read."""

    step: int
    world_size: int
    files: dict[str, FileRecord]
    extra: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def write_part(folder: Path, rank: int) -> None:
    """List what ``rank`` has written into ``folder``, where every rank writes. Rank 0 takes what belongs to no rank."""
    own = []
    for path in _files_in(folder):
        if path.name.startswith(".") and path.name != ".metadata":
            continue  # another rank is writing it under this name, and renames it when it is done
        match = _OF_RANK.match(path.name)
        if (int(match.group(1)) if match else 0) == rank:
            own.append(path)
    records = {name: asdict(record) for name, record in _records(folder, own).items()}
    write_text_atomically(folder / _part_name(rank), json.dumps({"files": records}))


def write_manifest(
    folder: Path,
    *,
    step: int,
    world_size: int,
    parts: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Record every file now in ``folder``. Files are flushed to the disk first, so the manifest never promises more.

    ``parts``: for each subfolder that workers have written, the number of ranks whose part must be there.
    """
    records: dict[str, FileRecord] = {}
    for role, num_ranks in (parts or {}).items():
        for rank in range(num_ranks):
            listed = _read_part(folder, role, rank, num_ranks)
            records |= {f"{role}/{name}": record for name, record in listed.items()}
    _require_files(folder, records)
    rest = [path for path in _files_in(folder) if _name(folder, path) not in records]
    records |= _records(folder, rest)
    manifest = Manifest(step, world_size, dict(sorted(records.items())), dict(extra or {}))
    write_text_atomically(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1, sort_keys=True))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Parse the manifest, or say why the folder is not a checkpoint. Files are not looked at."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise BrokenCheckpoint(folder, f"it has no {MANIFEST_NAME} (an interrupted save?)", damaged=True)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(folder, f"{MANIFEST_NAME} is not readable ({error})", damaged=True) from error
    if manifest.format_version > FORMAT_VERSION:
        raise BrokenCheckpoint(
            folder, f"it has format version {manifest.format_version}, this program reads up to {FORMAT_VERSION}"
        )
    return manifest


def verify_folder(folder: Path, *, checksums: bool = True) -> Manifest:
    """Return the manifest of a complete folder; raise ``BrokenCheckpoint`` naming the first file that is wrong.

    Without ``checksums`` nothing but sizes is looked at: quick, and blind to changed bytes.
    """
    manifest = read_manifest(folder)
    _require_files(folder, manifest.files)
    if checksums:
        known = {folder / name: record.sha256 for name, record in manifest.files.items() if record.sha256}
        try:
            sums = dict(zip(known, _hashed(known), strict=True))
        except OSError as error:
            raise BrokenCheckpoint(folder, f"a file cannot be read ({error})", damaged=True) from error
        for path in known:
            if sums[path] != known[path]:
                reason = f"file {_name(folder, path)} has changed since it was saved (checksum differs)"
                raise BrokenCheckpoint(folder, reason, damaged=True)
    return manifest


def _read_part(folder: Path, role: str, rank: int, num_ranks: int) -> dict[str, FileRecord]:
    path = folder / role / _part_name(rank)
    try:
        raw = json.loads(path.read_text())
        return {name: FileRecord(**record) for name, record in raw["files"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(
            folder,
            f"the part that rank {rank} of {num_ranks} of {role} wrote is not there ({role}/{path.name}); "
            "trainer.default_local_dir must be a folder that all nodes share",
        ) from error


def _require_files(folder: Path, records: Mapping[str, FileRecord]) -> None:
    for name, expected in records.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise BrokenCheckpoint(folder, f"file {name} is missing", damaged=True) from None
        if size != expected.size:
            raise BrokenCheckpoint(folder, f"file {name} has {size} bytes instead of {expected.size}", damaged=True)


def _records(folder: Path, paths: list[Path]) -> dict[str, FileRecord]:
    for path in paths:
        flush_to_disk(path)
    sums = _hashed(paths)
    return {_name(folder, path): FileRecord(path.stat().st_size, sha) for path, sha in zip(paths, sums, strict=True)}


def _hashed(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _part_name(rank: int) -> str:
    return f"part_{rank}.json"
