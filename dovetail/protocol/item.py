"""`DataProtoItem`: one row of a batch. What `batch[3]` gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict


@dataclass
class DataProtoItem:
    """One row: tensors without the batch dimension, numpy entries, and the meta_info of its batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
