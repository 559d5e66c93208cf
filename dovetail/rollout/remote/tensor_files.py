"""Buckets of weights as files in shared memory, and the payload that makes an SGLang server map one. Makes no calls."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, Bucket, NamedTensors, iter_buckets
from dovetail.weight_sync.shared_memory import memory_folder, require_room


class TensorFiles:
    """One file at a time, in a folder that ends with the `with` block."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="dovetail-sglang-", dir=memory_folder()))

    def payloads(self, weights: NamedTensors) -> Iterator[str]:
        """The payload of each bucket in turn. Its file is gone when the next one is asked for; a reader that has
        mapped it keeps what it has."""
        path = self._folder / "bucket.pt"
        for bucket in iter_buckets(weights, self._bucket_bytes):
            require_room(self._folder, bucket.num_bytes)
            torch.save(_on_host(bucket), path)
            try:
                yield _payload(path)
            finally:
                path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _TensorsIn:
    """Unpickled, it is the list of (name, tensor) in the file: SGLang unpickles what it is sent in its scheduler, and
    allows functions of torch. The other way, handles of torch.multiprocessing, needs a manager process that keeps this
    process's output open, and sockets that two environments cannot share."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return functools.partial(torch.load, mmap=True, weights_only=True, map_location="cpu"), (self._path,)


def _payload(path: Path) -> str:
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=4).dump(_TensorsIn(path))
    return base64.b64encode(buffer.getvalue()).decode()


def _on_host(bucket: Bucket) -> list[tuple[str, Tensor]]:
    host = Bucket(bucket.entries, bucket.buffer[: bucket.num_bytes].cpu().clone())
    return list(host.tensors())
