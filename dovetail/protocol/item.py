"""`DataProtoItem`: one row of a batch. Holds no column; `DataProto.from_items` makes rows a batch again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensordict import TensorDict

from dovetail.protocol.columns import as_array


@dataclass
class DataProtoItem:
    """One row: tensors without the batch dimension, numpy entries, and the meta_info of its batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def numpy_columns(self) -> dict[str, np.ndarray]:
        """The numpy entries as columns of one row."""
        return {name: _one_row(value) for name, value in self.non_tensor_batch.items()}


def _one_row(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value[None]
    if isinstance(value, np.generic):
        return np.asarray([value])
    return as_array([value])
