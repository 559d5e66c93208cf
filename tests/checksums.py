"""Checksums of a stream of weights, to compare what an engine holds with what was sent."""

from __future__ import annotations

from collections.abc import Collection

from dovetail.weight_sync import NamedTensors, tensor_checksum


def weight_checksum(weights: NamedTensors, sample: Collection[str] | None = None) -> dict[str, str]:
    """Checksum by name, of the tensors named in `sample` (None: all)."""
    return {name: tensor_checksum(tensor) for name, tensor in weights if sample is None or name in sample}
