"""Hand buckets to other processes of this machine: files in memory, or CUDA IPC on one GPU. Does not know the readers.

Each bucket is a file under /dev/shm: written once, mapped by readers, removed when they are done. A mapping
outlives the removal, so a reader may keep tensors of a bucket that is gone. With CUDA IPC nothing passes through the
host: a handle is for one reader, can be imported once, and holds plain values, so any channel can carry it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, iter_buckets
from dovetail.weight_sync.stream import NamedTensors

IpcHandle: TypeAlias = tuple[Any, ...]
"""Numbers, bytes and booleans: what `import_ipc_handle` needs to map exported memory."""


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
            self._save(bucket.on_host(), path)
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


def export_ipc_handle(memory: Tensor) -> IpcHandle:
    """Let one other process read the storage of `memory`. Keep it unchanged until that process has released it."""
    torch.cuda.current_stream(memory.device).synchronize()
    # The device index is left out: processes number their devices differently.
    _, *handle = memory.untyped_storage()._share_cuda_()
    return tuple(handle)


def import_ipc_handle(handle: Sequence[Any], device: torch.device) -> Tensor:
    """Exported memory as bytes. RuntimeError where this process cannot map it: other device, other container.

    The exporting process owns it: copy what must live longer, and let the copy finish before releasing it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
