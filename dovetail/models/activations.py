"""Spend time or host memory instead of device memory on activations: recomputation and offloading.

Both are PyTorch's own mechanisms, switched on here in one place. Neither changes results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MIN_BYTES = 1 << 16


def enable_gradient_checkpointing(hf_model: Any) -> None:
    """Keep only each layer's input and recompute the rest in backward. Active in training mode only.

    Non-reentrant: keyword arguments (`segments`, which packed attention needs) reach the recomputed layer, and FSDP2's
    hooks see a normal backward.
    """
    hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # The layers recompute only in training mode, which a loaded model is not in.
    hf_model.train()


@contextmanager
def activation_offload(min_bytes: int = _MIN_BYTES) -> Iterator[None]:
    """Around a forward pass: tensors saved for backward wait in host memory. No effect on a CPU.

    With gradient checkpointing what is saved is one input per layer, so this moves exactly those. Parameters are not
    moved: they stay on the device anyway. Copies go to pinned memory in stream order, so the host never waits.
    """

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if not tensor.is_cuda or tensor.nbytes < min_bytes or _is_parameter(tensor):
            return tensor
        held = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
        held.copy_(tensor, non_blocking=True)
        return tensor.device, held

    def unpack(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, held = saved
        return held.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
