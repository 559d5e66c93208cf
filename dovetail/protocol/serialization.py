"""How a batch travels: tensors through pickle protocol 5 without a copy, and its parts as one TensorDict. No Ray.

A tensor is written as a numpy array over its own memory, so a pickler that keeps buffers out of band (Ray's) copies the
bytes once, into shared memory. The reader wraps that memory again: no copy. Memory that several processes share arrives
as a `ReadOnlyTensor`, which refuses in-place writes. Autograd history and strides are not kept. One TensorDict is the
form in which verl's newer workers take batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dovetail.protocol.columns import as_array
from dovetail.protocol.readonly import ReadOnlyTensor

# numpy has no such dtypes; their bytes travel as integers of the same width.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Types that hold no tensor. Most object columns are strings, and looking into each costs more than sending it.
_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


class TensorBuffer:
    """Stands for a tensor while it is pickled; what comes out at the other end is a tensor again."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: torch.dtype) -> None:
        self.array = array
        self.dtype = dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap_array, (self.array, self.dtype)


def pack_tensor(tensor: torch.Tensor) -> TensorBuffer:
    """View a tensor as numpy memory. Copies only what is on a device or not contiguous."""
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().contiguous()
    plain = plain.resolve_conj().resolve_neg()
    dtype = plain.dtype
    try:
        array = plain.numpy()
    except TypeError:
        array = plain.view(_INTEGERS[dtype.itemsize]).numpy()
    return TensorBuffer(array, dtype)


def wrap_array(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Wrap the memory of an array in a tensor, read-only if the memory is."""
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    # torch.from_numpy warns about read-only memory and then forgets it. The ctypes block says nothing, and keeps the
    # array (and with it Ray's pin on the object) alive as long as the tensor lives.
    block = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    block.owner = array  # pyrefly: ignore [missing-attribute]
    tensor = torch.frombuffer(block, dtype=dtype).view(array.shape)
    return tensor if array.flags.writeable else tensor.as_subclass(ReadOnlyTensor)


def pack_objects(value: Any, memo: dict[int, Any]) -> Any:
    """Replace the tensors inside nested dicts, lists, tuples and object arrays, without touching ``value``.

    ``memo`` keeps shared entries shared: an image that many rows hold is sent once.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if id(value) not in memo:
        memo[id(value)] = pack_tensor(value) if isinstance(value, torch.Tensor) else _pack_container(value, memo)
    return memo[id(value)]


def _pack_container(value: Any, memo: dict[int, Any]) -> Any:
    # Exact types only: a subclass may carry state that a rebuilt copy would lose.
    # A container is in the memo before its entries are looked at: it may contain itself.
    kind = type(value)
    if kind is dict:
        packed: dict[Any, Any] = {}
        memo[id(value)] = packed
        packed.update((key, pack_objects(entry, memo)) for key, entry in value.items())
        return packed if any(packed[key] is not value[key] for key in packed) else value
    if kind is np.ndarray and value.dtype == object:
        entries = value.reshape(-1).tolist()
        if set(map(type, entries)) <= _LEAVES:
            return value
        new = np.empty(value.shape, dtype=object)
        memo[id(value)] = new
        for i, entry in enumerate(entries):
            new.reshape(-1)[i] = pack_objects(entry, memo)
        return new
    if kind is list:
        copied: list[Any] = []
        memo[id(value)] = copied
        copied.extend(pack_objects(entry, memo) for entry in value)
        return copied if any(a is not b for a, b in zip(copied, value, strict=True)) else value
    if kind is tuple:
        entries = tuple(pack_objects(entry, memo) for entry in value)
        return entries if any(a is not b for a, b in zip(entries, value, strict=True)) else value
    return value


def put_together(
    tensors: Mapping[str, Any], arrays: Mapping[str, Any], facts: Mapping[str, Any], rows: int
) -> TensorDict:
    """Tensors as they are, one entry per row of a numpy column, facts about the whole batch."""
    clash = sorted(set(facts) & {*tensors, *arrays})
    if clash:
        raise ValueError(f"meta_info {clash} have the names of columns; rename one of each before to_tensordict.")
    joined = TensorDict(dict(tensors), batch_size=[rows])
    for name, array in arrays.items():
        entries: list[Any] = [NonTensorData(entry) for entry in array]
        joined.set(name, torch.stack(entries) if entries else NonTensorStack(batch_size=[0]))
    for name, fact in facts.items():
        joined.set(name, cast(Any, NonTensorData(fact, batch_size=[rows])))
    return joined


def taken_apart(joined: TensorDict) -> tuple[Tensors, Arrays, dict[str, Any]]:
    """Tensors, numpy columns, facts."""
    tensors: Tensors = {}
    arrays: Arrays = {}
    facts: dict[str, Any] = {}
    for name in joined.keys():  # noqa: SIM118  a TensorDict iterates over its rows
        value = cast(Any, joined._get_str(str(name), None))
        if isinstance(value, NonTensorStack):
            arrays[str(name)] = _column([entry.data for entry in value.tensordicts])
        elif isinstance(value, NonTensorData):
            facts[str(name)] = value.data
        elif isinstance(value, torch.Tensor):
            tensors[str(name)] = value
        else:
            raise TypeError(
                f"{name!r} is a {type(value).__name__}; a batch holds tensors, rows of other data and facts."
            )
    return tensors, arrays, facts


def _column(entries: list[Any]) -> np.ndarray:
    if (
        entries
        and isinstance(entries[0], np.generic)
        and len({getattr(entry, "dtype", None) for entry in entries}) == 1
    ):
        return np.array(entries)
    return as_array(entries)
