"""Hand buckets to other processes of this machine through files in memory. Knows nothing of who reads them.

Each bucket is a file under /dev/shm: written once, mapped by readers, removed when they are done. A
mapping outlives the removal, so a reader may keep tensors of a bucket that is gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, iter_buckets
from dovetail.weight_sync.stream import NamedTensors


class SharedMemoryBuckets:
    """Writes buckets one at a time: `for path in shared.write(weights): tell the readers, wait for them`.

    `save` writes the tensors by name into a file: as safetensors, unless the readers want another format.
    """

    def __init__(
        self,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        save: Callable[[dict[str, Tensor], Path], None] = save_file,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._save = save
        self._folder = Path(tempfile.mkdtemp(prefix="dovetail-weights-", dir=memory_folder()))
        self._count = 0

    def write(self, weights: NamedTensors) -> Iterator[Path]:
        """The path of each bucket in turn. It is removed when the next one is asked for."""
        for bucket in iter_buckets(weights, self._bucket_bytes):
            path = self._folder / f"bucket-{self._count}"
            self._count += 1
            require_room(path.parent, bucket.num_bytes)
            self._save(_on_host(bucket), path)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_bucket_file(path: str | Path) -> list[tuple[str, Tensor]]:
    """The tensors of one file. They stay valid when the file is removed."""
    with safe_open(path, framework="pt", device="cpu") as handle:
        return [(name, handle.get_tensor(name)) for name in handle.keys()]  # noqa: SIM118  not a dict


def _on_host(bucket: Bucket) -> dict[str, Tensor]:
    host = Bucket(bucket.entries, bucket.buffer[: bucket.num_bytes].cpu())
    # safetensors refuses tensors that share storage; views of one buffer do, though they do not overlap.
    return {name: tensor.clone() for name, tensor in host.tensors()}


def memory_folder() -> str | None:
    """Where files lie in memory; None where there is no such folder."""
    return "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None


def require_room(folder: Path, num_bytes: int) -> None:
    """OSError that names the setting, where a bucket of this size does not fit."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < num_bytes:
        raise OSError(
            f"{folder.parent} has {free >> 20} MiB free, a bucket of weights needs {num_bytes >> 20} MiB; lower "
            "rollout.update_weights_bucket_megabytes or give the machine more shared memory."
        )
