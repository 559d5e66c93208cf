"""Hand buckets to a process on the same GPU: it maps the memory they lie in. Nothing passes through the host.

A ticket is good for one reader and once. It holds plain values, so that any channel can carry it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Ticket: TypeAlias = tuple[Any, ...]
"""Numbers, bytes and booleans: what `borrow` needs to map the memory that `lend` was given."""


def lend(memory: Tensor) -> Ticket:
    """Let one other process read `memory`, all of its storage. Keep it, unchanged, until that process has let go."""
    torch.cuda.current_stream(memory.device).synchronize()
    # Which number the device has is each process's own affair.
    _, *ticket = memory.untyped_storage()._share_cuda_()
    return tuple(ticket)


def borrow(ticket: Sequence[Any], device: torch.device) -> Tensor:
    """The lent memory as bytes. RuntimeError where this process cannot map it: on another device, in another container.

    It is still the lender's: copy what must outlive the loan, and let the copy finish first.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *ticket)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
