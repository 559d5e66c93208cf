"""What the kernels ask about a device before they choose how to be cut."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch


class Device(NamedTuple):
    processors: int
    large_shared_memory: bool
    """Of a multiprocessor: on Hopper and the large cards of Blackwell."""


@lru_cache(maxsize=16)
def described(device: torch.device) -> Device:
    """A CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, properties.shared_memory_per_block_optin >= 200 << 10)
