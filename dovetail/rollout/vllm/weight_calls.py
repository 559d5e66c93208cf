"""A weight update as a series of calls to vLLM's workers. Whom they reach, and how, is the engines' affair."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dovetail.rollout.base import WeightUpdateError
from dovetail.weight_sync import (
    DiskVersion,
    ExpectedWeights,
    GroupAddress,
    NamedTensors,
    SharedMemoryBuckets,
)

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""A method of `WeightUpdateExtension` and its arguments, for every worker alike."""
Calls: TypeAlias = Generator[Call, list[Any], None]
"""Yields calls, is sent what each worker returned."""

_IN_PLACE_BYTES = 64 * 1024**2


def update_calls(expected: ExpectedWeights, loads: Iterable[Call]) -> Calls:
    """Begin, load, finish; WeightUpdateError on the first misfit, or on what never came.

    The loads are run through to the end even after a misfit: on the other ranks of a sharded source a gather waits.
    """
    shapes = {name: list(shape) for name, shape in expected.shapes.items()}
    optional = {name: list(shape) for name, shape in expected.optional.items()}
    yield "dovetail_begin_update", (shapes, dict(expected.ties), *([optional] if optional else []))
    problem: str | None = None
    try:
        for call in loads:
            if problem is None:
                problem = _first(iter((yield call)))
    except Exception:
        yield "dovetail_finish_update", ()
        raise
    missing = _first(iter((yield "dovetail_finish_update", ())))
    if problem or missing:
        raise WeightUpdateError(problem or missing)


def run_calls(calls: Calls, call_workers: Callable[[str, tuple[Any, ...]], list[Any]]) -> None:
    """Make every call, one after the other, for an engine whose calls block."""
    try:
        call = next(calls)
        while True:
            call = calls.send(call_workers(*call))
    except StopIteration:
        return


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
    with SharedMemoryBuckets(bucket_bytes) as shared:
        for path in shared.write(weights):
            yield "dovetail_load_file", (str(path),)


def loads_from_disk(version: DiskVersion) -> Iterator[Call]:
    """For workers that see the folder."""
    for file in sorted(version.folder.glob("*.safetensors")):
        yield "dovetail_load_file", (str(file),)


def loads_from_group() -> Iterator[Call]:
    """For workers that have joined a sender's group."""
    yield "dovetail_receive", ()


def join_call(address: GroupAddress, first_rank: int) -> Call:
    return "dovetail_join_group", (asdict(address), first_rank)


def checksum_call(names: Iterable[str], dtype: torch.dtype | None = None) -> Call:
    """Checksums of these tensors, rounded to `dtype` first; dtypes travel by name."""
    return "dovetail_checksums", (list(names), None if dtype is None else str(dtype).removeprefix("torch."))


def _first(problems: Iterator[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
