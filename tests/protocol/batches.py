"""Batches for the protocol's tests: hand-made ones and a hypothesis strategy with every kind of column."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from dovetail.protocol import DataProto

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def make_batch(rows: int, seed: int = 0) -> DataProto:
    """One tensor column of each dtype, one column that is not contiguous, numeric, string and object columns."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        str(dtype).removeprefix("torch."): torch.randint(0, 2, (rows, 3), generator=generator).to(dtype)
        for dtype in DTYPES
    }
    tensors["float32"] = torch.randn(rows, 3, generator=generator)
    tensors["transposed"] = torch.randn(4, rows, generator=generator).T
    tensors["row"] = torch.arange(rows)
    arrays = {
        "uid": [f"prompt-{row}" for row in range(rows)],
        "nested": [{"ids": list(range(row % 4)), "score": float("nan")} for row in range(rows)],
        "number": np.arange(rows, dtype=np.float64) / 3,
        "matrix": np.arange(rows * 2).reshape(rows, 2),
        "text": np.array([f"t{row}" for row in range(rows)], dtype="<U6"),
    }
    return DataProto.from_dict(tensors, arrays, {"temperature": 0.7})


def batches(min_rows: int = 0, max_rows: int = 24) -> st.SearchStrategy[DataProto]:
    """Batches of any length, with or without tensors and numpy columns."""

    def build(rows: int, seed: int, part: str) -> DataProto:
        batch = make_batch(rows, seed)
        if part == "tensors":
            return batch.select(non_tensor_batch_keys=[])
        if part == "arrays":
            return batch.select(batch_keys=[])
        return batch

    parts = st.sampled_from(["both", "tensors", "arrays"])
    return st.builds(build, st.integers(min_rows, max_rows), st.integers(0, 2**16), parts)


def assert_same(left: DataProto, right: DataProto) -> None:
    assert left.difference(right) is None, left.difference(right)
