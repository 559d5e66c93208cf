"""A weight update as a series of calls to vLLM's workers. Whom they reach, and how, is the engines' affair."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dovetail.rollout.base import WeightUpdateError
from dovetail.weight_sync import (
    ChecksummedWeights,
    DiskVersion,
    ExpectedWeights,
    GroupAddress,
    NamedTensors,
    SharedMemoryBuckets,
    Ticket,
    WeightMismatchError,
    choose_sample,
    iter_buckets,
    lend,
    require_equal,
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
    gap = _first(iter((yield "dovetail_finish_update", ())))
    if problem or gap:
        raise WeightUpdateError(problem or gap)


def run_calls(calls: Calls, call_workers: Callable[[str, tuple[Any, ...]], list[Any]]) -> None:
    """Make every call, one after the other, for an engine whose calls block."""
    try:
        call = next(calls)
        while True:
            call = calls.send(call_workers(*call))
    except StopIteration:
        return


def loads_in_place(weights: NamedTensors) -> Iterator[Call]:
    """For a worker in this process. Copies: vLLM keeps tensors until their layer is complete, a source reuses them."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        batch.append((name, tensor.detach().clone()))
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


def loads_on_device(weights: NamedTensors, bucket_bytes: int, device: torch.device) -> Iterator[Call]:
    """For one worker in another process on `device`, which has been seen to read what this process lends."""
    for bucket in iter_buckets(weights, bucket_bytes):
        memory = bucket.buffer.to(device)  # kept until the worker has answered
        yield "dovetail_load_lent", (lend(memory), bucket.header())


def trial_call(trial: Ticket) -> Call:
    """Whether workers can read what this process lends: each gives the bytes it found, or None."""
    return "dovetail_read_lent", (trial,)


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


class Verification:
    """Compares a sample of an update with what the model computes with afterwards (`rollout.verify_weights`)."""

    def __init__(self, expected: ExpectedWeights, count: int, dtype: Any) -> None:
        own = [name for name in expected.shapes if name not in expected.ties]
        # A tied head has to be in every sample: it is the one that goes stale unseen.
        self.names = sorted({*choose_sample(own, count), *expected.ties.values()})
        self._ties = expected.ties
        self._dtype = dtype
        self._stream: ChecksummedWeights | None = None

    def watch(self, weights: NamedTensors) -> NamedTensors:
        self._stream = ChecksummedWeights(weights, self.names, self._dtype)
        return self._stream

    def call(self) -> Call:
        return checksum_call(self.names)

    def compare(self, held: dict[str, str]) -> None:
        assert self._stream is not None, "watch() comes first"
        sent = dict(self._stream.checksums)
        sent |= {name: sent[own] for name, own in self._ties.items() if own in sent}
        try:
            require_equal(sent, held, where="the vLLM engine after a weight update")
        except WeightMismatchError as error:
            raise WeightUpdateError(str(error)) from error


def _first(problems: Iterator[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
