"""Hand buckets to other processes of this machine: files in memory, or CUDA IPC on one GPU. Does not know the readers.

Each bucket is a file in memory: written once, mapped by readers, closed when they are done. A mapping outlives that, so
a reader may keep tensors of a bucket that is gone. With CUDA IPC nothing passes through the host: a handle is for one
reader, can be imported once, and holds plain values, so any channel can carry it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, aligned, entries_of, iter_buckets
from dovetail.weight_sync.stream import NamedTensors

IpcHandle: TypeAlias = tuple[Any, ...]
"""Numbers, bytes and booleans: what `import_ipc_handle` needs to map exported memory."""
_LENGTH_BYTES = 8


def save_bucket(bucket: Bucket, path: Path) -> None:
    """As `read_bucket_file` reads it: the length of the table of contents, the table, the bytes."""
    header = bucket.header()
    start = _start(len(header))
    with path.open("wb") as file:
        file.write((len(header).to_bytes(_LENGTH_BYTES, "little") + header).ljust(start))
        bucket.buffer[: bucket.num_bytes].cpu().numpy().tofile(file)


def read_bucket_file(path: str | Path) -> list[tuple[str, Tensor]]:
    """The tensors of one file, which is mapped. They stay valid when the file is gone."""
    mapped = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    length = int.from_bytes(mapped[:_LENGTH_BYTES].numpy().tobytes(), "little")
    header = mapped[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes()
    return list(Bucket(entries_of(header), mapped[_start(length) :]).tensors())


def shared_memory_buckets(
    weights: NamedTensors,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    save: Callable[[Bucket, Path], None] = save_bucket,
) -> Iterator[Path]:
    """A path to each bucket in turn, which other processes can open until the next bucket is asked for.

    `save` writes it into the file: for `read_bucket_file`, unless the readers want another format.
    """
    for bucket in iter_buckets(weights, bucket_bytes):
        with _file_in_memory() as path:
            save(bucket, path)
            yield path


def _start(header_length: int) -> int:
    """Of the bytes behind a table of this length: tensors are views of them and need aligned starts."""
    return aligned(_LENGTH_BYTES + header_length)


@contextmanager
def _file_in_memory() -> Iterator[Path]:
    """On Linux a file without a name, reached through this process: a kill leaves nothing behind."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile(prefix="dovetail-weights-", dir=memory_folder()) as file:
            yield Path(file.name)
        return
    descriptor = os.memfd_create("dovetail-weights")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def memory_folder() -> str | None:
    """Where files lie in memory; None where there is no such folder."""
    return "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None


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
