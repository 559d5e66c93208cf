"""Small transfers between host and device that make neither wait: pinned buffers, events read late."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A device tensor of these numbers. Does not wait for the device."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.clone() if isinstance(values, torch.Tensor | np.ndarray) else host
    # The pinned block is reused only once the copy is done: the host allocator keeps track of it.
    return host.pin_memory().to(device, non_blocking=True)


class Readback:
    """A device buffer of `depth` slices, each copied to the host on its own and read when its copy is done."""

    def __init__(
        self, depth: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: int = 0
    ) -> None:
        self._on_cuda = device.type == "cuda"
        self.device = torch.full((depth, *size), fill, dtype=dtype, device=device)
        self._host = torch.zeros((depth, *size), dtype=dtype, pin_memory=True) if self._on_cuda else self.device
        self._events = [torch.cuda.Event() for _ in range(depth)] if self._on_cuda else []

    def send(self, index: int) -> None:
        if self._on_cuda:
            self._host[index].copy_(self.device[index], non_blocking=True)
            self._events[index].record()

    def read(self, index: int) -> np.ndarray:
        """The slice as last sent. Valid until it is sent again."""
        if self._on_cuda:
            self._events[index].synchronize()
        return self._host[index].numpy()
