"""Cut a stream of named tensors into buckets of bounded size. Never holds more than one bucket.

A bucket is one flat byte buffer and a table of contents, so that whatever carries it moves one block of memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dovetail.weight_sync.stream import NamedTensors

MIB = 1024**2
DEFAULT_BUCKET_BYTES = 512 * MIB
# Views of a wider dtype need aligned starts; 64 is also a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """Where one tensor lies in a bucket. `dtype` is torch's name without its prefix: "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """`buffer` is bytes, 1-D; only its first `num_bytes` belong to the bucket."""

    entries: tuple[BucketEntry, ...]
    buffer: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(aligned(entry.num_bytes) for entry in self.entries)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into the buffer."""
        for entry in self.entries:
            flat = self.buffer[entry.offset : entry.offset + entry.num_bytes]
            yield entry.name, flat.view(getattr(torch, entry.dtype)).view(entry.shape)

    def on_host(self) -> dict[str, Tensor]:
        """Copies by name: safetensors refuses tensors that share storage, as views of one buffer do."""
        host = Bucket(self.entries, self.buffer[: self.num_bytes].cpu())
        return {name: tensor.clone() for name, tensor in host.tensors()}

    def runs(self) -> Iterator[tuple[tuple[BucketEntry, ...], Tensor]]:
        """The bucket in stretches without gaps, and the bytes of each: one, unless a tensor is of an odd size."""
        first = 0
        for end in range(1, len(self.entries) + 1):
            last = self.entries[end - 1]
            stop = last.offset + last.num_bytes
            if end == len(self.entries) or self.entries[end].offset != stop:
                run = self.entries[first:end]
                yield run, self.buffer[run[0].offset : stop]
                first = end

    def header(self) -> bytes:
        return json.dumps([asdict(entry) for entry in self.entries]).encode()


def entries_of(header: bytes) -> tuple[BucketEntry, ...]:
    """The opposite of `Bucket.header`."""
    return tuple(
        BucketEntry(entry["name"], entry["dtype"], tuple(entry["shape"]), entry["offset"])
        for entry in json.loads(header)
    )


@torch.no_grad()
def iter_buckets(weights: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    All buckets share one buffer on the device of the first tensor: use a bucket before asking for the next.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1.")
    buffer: Tensor | None = None
    entries: list[BucketEntry] = []
    used = 0
    for name, tensor in weights:
        entry = BucketEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), used)
        size = aligned(entry.num_bytes)
        if entries and used + size > bucket_bytes:
            assert buffer is not None, "a bucket with entries has a buffer"
            yield Bucket(tuple(entries), buffer)
            entries, used = [], 0
            entry = BucketEntry(entry.name, entry.dtype, entry.shape, 0)
        if buffer is None or used + size > buffer.numel():
            # Grows to the largest need and no further: small models never pay for a full bucket.
            buffer = _grown(buffer, used, max(used + size, min(bucket_bytes, 2 * used)), tensor.device)
        target = buffer[used : used + entry.num_bytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
        entries.append(entry)
        used += size
    if entries:
        assert buffer is not None, "a bucket with entries has a buffer"
        yield Bucket(tuple(entries), buffer)


def _grown(buffer: Tensor | None, used: int, num_bytes: int, device: torch.device) -> Tensor:
    larger = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if buffer is not None and used:
        larger[:used] = buffer[:used]
    return larger


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
