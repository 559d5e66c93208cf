"""Check that the parts of a batch fit together: one length, types that travel, a name only once. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise unless every value is a tensor column, and all have the same number of rows."""
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    _check_lengths({name: len(tensor) for name, tensor in tensors.items()})


def check_parts(batch: TensorDict | None, arrays: Mapping[str, Any]) -> None:
    """Raise unless tensors and numpy columns have the same number of rows, types that travel and different names."""
    lengths: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    if batch is not None:
        if len(batch.batch_size) != 1:
            raise ValueError(f"batch has batch_size {tuple(batch.batch_size)}; it must have one dimension, rows.")
        tensors = {str(name): tensor for name, tensor in batch.items()}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        lengths["(batch)"] = int(batch.batch_size[0])
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"non_tensor_batch[{name!r}] is a {type(array).__name__}; use a numpy array (DataProto.from_dict "
                f"converts sequences)."
            )
        if array.ndim == 0:
            raise ValueError(f"non_tensor_batch[{name!r}] is a scalar; a column has one entry per row.")
        lengths[name] = len(array)
    _check_lengths(lengths)
    twice = tensors.keys() & arrays.keys()
    if twice:
        raise ValueError(f"columns {sorted(twice)} are both tensors and numpy arrays; rename one of each.")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"batch[{name!r}] is a {type(value).__name__}; what is no tensor goes to non_tensor_batch.")
    if value.is_nested:
        raise TypeError(f"batch[{name!r}] is a nested tensor; pad it, or put one tensor per row in an object column.")
    if value.ndim == 0:
        raise ValueError(f"batch[{name!r}] is a scalar; a column has one entry per row.")


def _check_lengths(lengths: Mapping[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns have different numbers of rows: {dict(lengths)}; give each one entry per row.")
