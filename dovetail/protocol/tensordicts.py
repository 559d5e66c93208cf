"""A batch's three parts as one TensorDict, and back. The form in which verl's newer workers take batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


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
    column = np.empty(len(entries), dtype=object)
    for row, entry in enumerate(entries):
        column[row] = entry
    return column
