"""Weights as calls to vLLM's workers. Whom they reach, and how, is the engine's affair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

from dovetail.weight_sync import NamedTensors, shared_memory_buckets

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""A method of `WorkerExtension` and its arguments, for every worker alike."""

_IN_PLACE_BYTES = 64 * 1024**2


def loads_in_place(weights: NamedTensors, *, copy: bool = True) -> Iterator[Call]:
    """For a worker in this process. Copies, unless the tensors are the engine's own: vLLM keeps tensors until their
    layer is complete, a source reuses them."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        batch.append((name, tensor.detach().clone() if copy else tensor))
        size += tensor.nbytes
        if size >= _IN_PLACE_BYTES:
            yield "dovetail_load", (batch,)
            batch, size = [], 0
    if batch:
        yield "dovetail_load", (batch,)


def loads_through_shared_memory(weights: NamedTensors, bucket_bytes: int) -> Iterator[Call]:
    """For workers in other processes of this machine."""
    for path in shared_memory_buckets(weights, bucket_bytes):
        yield "dovetail_load_bucket", (str(path),)
