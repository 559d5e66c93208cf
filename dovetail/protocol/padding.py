"""Pad a batch to a multiple of a number of ranks, and undo it. Padding rows repeat real rows, from the first on."""

from __future__ import annotations

from dovetail.protocol.dataproto import DataProto
from dovetail.protocol.row_numbers import filled_up


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return a batch whose length is a multiple of ``size_divisor``, and how many rows were added at its end."""
    if size_divisor <= 0:
        raise ValueError(f"size_divisor={size_divisor} must be positive.")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(filled_up(len(data), pad_size)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"pad_size={pad_size} does not fit a batch of {len(data)} rows; pass what padding returned.")
    return data[: len(data) - pad_size] if pad_size else data
