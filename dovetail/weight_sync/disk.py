"""Weights through a folder that trainer and engines both see. A reader sees a complete version or none.

    <folder>/VERSION                  {"version": 12, "folder": "v00000012"}
    <folder>/v00000012/model-00000.safetensors ... model.safetensors.index.json

A version is written beside, renamed into place, and only then named in VERSION, which is itself replaced in one step.
The folders are what `transformers` and every engine read.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dovetail.observability.disk import flush_to_disk, make_readable, write_text_atomically
from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, iter_buckets
from dovetail.weight_sync.stream import NamedTensors

_VERSION_FILE = "VERSION"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class DiskVersion:
    """One complete version."""

    version: int
    folder: Path

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in turn, as a training backend streams them."""
        files = json.loads((self.folder / _INDEX).read_text())["weight_map"]
        for file in sorted(set(files.values())):
            with safe_open(self.folder / file, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118  not a dict
                    yield name, handle.get_tensor(name)


class DiskWeights:
    """The folder. `keep` versions stay, so that a slow reader does not lose the one it is reading."""

    def __init__(self, folder: str | Path, *, keep: int = 2, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest version must stay.")
        self.folder = Path(folder)
        self._keep = keep
        self._bucket_bytes = bucket_bytes

    def write(self, weights: NamedTensors, version: int) -> DiskVersion:
        """Publish a version. Only one process may write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"v{version:08d}"
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self.folder))
        try:
            self._write_files(work, weights)
            make_readable(work)
            target = self.folder / name
            shutil.rmtree(target, ignore_errors=True)  # the same version once more, after a restart
            os.rename(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        entry = {"version": version, "folder": name}
        write_text_atomically(self.folder / _VERSION_FILE, json.dumps(entry))
        self._prune(name)
        return DiskVersion(version, target)

    def latest(self) -> DiskVersion | None:
        """The newest complete version, None before the first."""
        try:
            entry = json.loads((self.folder / _VERSION_FILE).read_text())
        except FileNotFoundError:
            return None
        return DiskVersion(entry["version"], self.folder / entry["folder"])

    def _write_files(self, work: Path, weights: NamedTensors) -> None:
        files: dict[str, str] = {}
        total = 0
        for number, bucket in enumerate(iter_buckets(weights, self._bucket_bytes)):
            file = f"model-{number:05d}.safetensors"
            tensors = bucket.on_host()
            save_file(tensors, work / file, metadata={"format": "pt"})
            flush_to_disk(work / file)
            files.update(dict.fromkeys(tensors, file))
            total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_text_atomically(work / _INDEX, json.dumps(index, indent=1))

    def _prune(self, newest: str) -> None:
        versions = sorted(path.name for path in self.folder.glob("v????????") if path.name <= newest)
        for name in versions[: -self._keep]:
            shutil.rmtree(self.folder / name, ignore_errors=True)
