"""Tensors that wait in host memory while another part of the program has the device. Knows no model and no optimizer.

What moves is the memory behind the tensors, not the tensors: Megatron's parameters, their gradients and the optimizer's
shards are views of a few large buffers, and every view stays what it was.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """The storages of some tensors, here or on the host. Works on the CPU too, where it costs a copy and frees none."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy to the host and free the device's memory. A second call changes nothing."""
        if self._away:
            return
        for storage in storages(tensors):
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=flat.is_cuda)
            host.copy_(flat)
            self._away.append((storage, host))
        for storage, _ in self._away:
            storage.resize_(0)

    def onload(self) -> None:
        """Bring back what went away."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        self._away = []


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind the tensors, each piece once; what is empty is left out."""
    by_id: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            by_id.setdefault(storage_id(tensor), storage)
    return list(by_id.values())


def storage_id(tensor: Tensor) -> int:
    """The same for all views of one piece of memory, wherever its contents are. Its address would change."""
    return tensor.untyped_storage()._cdata
