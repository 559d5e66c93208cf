"""Weights through a folder that trainer and servers both see. A reader sees a complete version or none.

    <folder>/v00000012/model-00000.safetensors ... model.safetensors.index.json

A version is written beside and renamed into place. The folders are what `transformers` and every engine read.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from dovetail.observability.disk import flush_to_disk, make_readable, write_text_atomically
from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, iter_buckets
from dovetail.weight_sync.stream import NamedTensors

_KEPT = 2
"""Versions that stay, so that a slow reader does not lose the one it is reading."""


def write_version(
    folder: str | Path, weights: NamedTensors, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Path:
    """Write a version and return its folder. Only one process may write."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"v{version:08d}"
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        _write_files(work, weights, bucket_bytes)
        make_readable(work)
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)  # the same version once more, after a restart
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    versions = sorted(path for path in folder.glob("v????????") if path.name <= name)
    for older in versions[:-_KEPT]:
        shutil.rmtree(older, ignore_errors=True)
    return target


def _write_files(work: Path, weights: NamedTensors, bucket_bytes: int) -> None:
    files: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(iter_buckets(weights, bucket_bytes)):
        file = f"model-{number:05d}.safetensors"
        tensors = bucket.on_host()
        save_file(tensors, work / file, metadata={"format": "pt"})
        flush_to_disk(work / file)
        files.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    write_text_atomically(work / "model.safetensors.index.json", json.dumps(index, indent=1))
