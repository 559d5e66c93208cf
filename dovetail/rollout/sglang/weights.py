"""Weights on their way to SGLang: checked before they are sent, handed over in shared memory. Makes no calls.

SGLang passes over a tensor it does not know and dies of one with another shape. So both are found here, by name.
"""

from __future__ import annotations

import base64
import functools
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from dovetail.rollout.base import WeightUpdateError
from dovetail.weight_sync import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    DiskVersion,
    ExpectedWeights,
    NamedTensors,
    WeightAccount,
    iter_buckets,
)


class CheckedWeights:
    """Passes on the tensors that fit, until one does not; takes the rest of the source even so: on the other ranks of
    a sharded source a gather waits. As a context manager it does the same when the update fails half-way. A tied tensor
    goes under the one name that SGLang loads it by, once."""

    def __init__(self, weights: NamedTensors, expected: ExpectedWeights) -> None:
        self._weights = iter(weights)
        self._ties = expected.ties
        self._account = WeightAccount(expected)
        self._sent: set[str] = set()
        self._problem: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            if self._problem is None:
                self._problem = self._account.problem_with(name, tuple(tensor.shape))
            own = self._ties.get(name, name)
            if self._problem is None and own not in self._sent:
                self._sent.add(own)
                yield own, tensor.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            for _ in self._weights:
                pass

    def require_complete(self) -> None:
        """After the end: WeightUpdateError for the first misfit, or for what never came."""
        problem = self._problem or self._account.gap()
        if problem is not None:
            raise WeightUpdateError(problem)


class TensorFiles:
    """Buckets of weights as files in memory, one at a time, and the payloads that make SGLang read them."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="dovetail-sglang-", dir=shared))

    def payloads(self, weights: NamedTensors) -> Iterator[str]:
        """The payload of each bucket in turn. Its file is gone when the next one is asked for; a reader that has
        mapped it keeps what it has."""
        path = self._folder / "bucket.pt"
        for bucket in iter_buckets(weights, self._bucket_bytes):
            _require_room(self._folder, bucket.num_bytes)
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


def check_folder(found: DiskVersion, expected: ExpectedWeights) -> None:
    """WeightUpdateError if the folder does not hold the model's tensors. Reads names and shapes only."""
    account = WeightAccount(expected)
    names: set[str] = set()
    for file in sorted(found.folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  not a dict
                problem = account.problem_with(name, tuple(handle.get_slice(name).get_shape()))
                if problem is not None:
                    raise WeightUpdateError(f"{found.folder}: {problem}")
                names.add(name)
    gap = account.gap()
    if gap is None:
        unread = sorted({own for name, own in expected.ties.items() if name in names} - names)
        gap = f"SGLang reads a tied tensor under the name {unread[0]} only." if unread else None
    if gap is not None:
        raise WeightUpdateError(f"{found.folder}: {gap}")


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


def _require_room(folder: Path, num_bytes: int) -> None:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < num_bytes:
        raise OSError(
            f"{folder.parent} has {free >> 20} MiB free, a bucket of weights needs {num_bytes >> 20} MiB; lower "
            "rollout.update_weights_bucket_megabytes or give the machine more shared memory."
        )
