"""Tensors from the host to a device, without waiting for the device. Knows no columns and no models."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on the device: a tensor, or a dataclass, tuple or dict that holds some.

    Copies to CUDA start from pinned memory. The host allocator keeps such a block until its copy is done, so the host
    can go on; kernels that are launched later run after the copy.
    """
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and device.type == "cuda":
            # A column may be expanded from one row, and such memory cannot be written to.
            return value.contiguous().pin_memory().to(device, non_blocking=True)
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: to_device(getattr(value, field.name), device) for field in fields(value)})
    if isinstance(value, tuple):
        return tuple(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return value
