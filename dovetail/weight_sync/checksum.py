"""Checksums of weights, to prove that what an engine holds is what the trainer sent. Equal bytes, equal checksum."""

from __future__ import annotations

import bisect
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dovetail.config.wording import name_some
from dovetail.weight_sync.stream import NamedTensors

_BLOCK = 1 << 16
# Blocks of one launch, whose products in 64 bits take 32 MiB; on a CPU no more than its cache holds.
_AT_ONCE = {"cpu": 4}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightMismatchError(RuntimeError):
    """Two sides that must hold equal weights do not. The message names the tensors."""


def tensor_checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Depends on values and their dtype, not on shape, device or strides. The two zeros are one value.

    The sum of all numbers, read as integers, each times an odd number of its place, modulo 2^64: exact in any order,
    so that a device computes it where the tensor is. It finds mistakes, not forgeries.
    """
    values = tensor.detach()
    if values.is_floating_point():
        values = values.to(dtype or values.dtype) + 0.0
    numbers = values.contiguous().flatten().view(_INTEGERS[values.element_size()])
    places = _place_numbers(values.device)
    whole = len(numbers) // _BLOCK * _BLOCK
    blocks = numbers[:whole].view(-1, _BLOCK).split(_AT_ONCE.get(values.device.type, 64))
    sums = [(part * places).sum(1) for part in blocks]
    if whole < len(numbers):
        sums.append((numbers[whole:] * places[: len(numbers) - whole]).sum()[None])
    of_blocks = torch.cat(sums)
    total = (of_blocks * places[torch.arange(len(of_blocks), device=places.device) % _BLOCK]).sum()
    return f"{total.item() % 2**64:016x}-{values.numel()}-{str(values.dtype).removeprefix('torch.')}"


@functools.cache
def _place_numbers(device: torch.device) -> Tensor:
    """An odd 64-bit number for each place of a block: its index through the mixing of splitmix64."""
    mixed = torch.arange(1, _BLOCK + 1, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 27)) | 1


class SampledWeights:
    """Passes a stream on and keeps the checksums of `count` of its tensors, and of those that are `always` wanted.

    Names decide, not their order: two streams of one model choose alike. For streams whose names are not known before.
    """

    def __init__(
        self,
        weights: NamedTensors,
        count: int,
        *,
        dtype: torch.dtype | None = None,
        always: Callable[[str, Tensor], bool] = lambda name, tensor: False,
    ) -> None:
        self._weights = weights
        self._count = count
        self._dtype = dtype
        self._always = always
        self._chosen: list[tuple[int, str]] = []
        self.checksums: dict[str, str] = {}
        self.always: list[str] = []
        """Names that came and are always wanted."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            if self._always(name, tensor):
                self.always.append(name)
                self.checksums[name] = tensor_checksum(tensor, self._dtype)
            elif self._is_chosen(name):
                self.checksums[name] = tensor_checksum(tensor, self._dtype)
            yield name, tensor

    def _is_chosen(self, name: str) -> bool:
        """Whether the name is among the `count` first by hash so far; the one it displaces is dropped."""
        bisect.insort(self._chosen, (zlib.crc32(name.encode()), name))
        if len(self._chosen) <= self._count:
            return True
        _, displaced = self._chosen.pop()
        self.checksums.pop(displaced, None)
        return displaced != name


def require_equal(sent: Mapping[str, str], held: Mapping[str, str], *, where: str) -> None:
    """Compare the names both sides know. Raises WeightMismatchError if any differs, or if there is none to compare."""
    shared = sent.keys() & held.keys()
    if not shared:
        raise WeightMismatchError(f"no tensor could be compared with {where}; the checksums prove nothing.")
    different = sorted(name for name in shared if sent[name] != held[name])
    if different:
        raise WeightMismatchError(
            f"{len(different)} of {len(shared)} compared tensors differ in {where}: {name_some(different, 8)}."
        )
