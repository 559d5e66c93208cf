"""CUDA IPC: another process on the same GPU maps the memory that buckets lie in. Nothing passes through the host.

A handle is for one reader and can be imported once. It holds plain values, so any channel can carry it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

IpcHandle: TypeAlias = tuple[Any, ...]
"""Numbers, bytes and booleans: what `import_ipc_handle` needs to map exported memory."""


def export_ipc_handle(memory: Tensor) -> IpcHandle:
    """Let one other process read the storage of `memory`. Keep it unchanged until that process has released it."""
    torch.cuda.current_stream(memory.device).synchronize()
    # The device index is left out: processes number their devices differently.
    _, *handle = memory.untyped_storage()._share_cuda_()
    return tuple(handle)


def import_ipc_handle(handle: Sequence[Any], device: torch.device) -> Tensor:
    """Exported memory as bytes. RuntimeError where this process cannot map it: other device, other container.

    The exporting process owns it: copy what must live longer, and let the copy finish before releasing it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
