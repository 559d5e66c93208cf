"""One process, no wrapper: the laptop default, and the reference every sharding is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from dovetail.backends.sharding import Precision, is_meta
from dovetail.models.load import materialize
from dovetail.models.weights import load_weights


class SingleProcess:
    """The module as it is."""

    reduce_factor = 1
    is_whole = True

    def __init__(self, module: nn.Module, precision: Precision, device: torch.device) -> None:
        if is_meta(module):
            materialize(module, device)
        self.module = module.to(device)
        self._precision = precision
        self._device = device

    def load_weights(self, path: Path) -> None:
        load_weights(self.module, path)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def compute_context(self) -> AbstractContextManager[object]:
        if not self._precision.is_mixed:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision.compute)

    def accumulating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after_forward(self) -> None:
        return None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def full_tensors(self, *, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            if not gradients:
                yield name, parameter.detach()
            elif parameter.grad is not None:
                yield name, parameter.grad

    def plain_name(self, name: str) -> str:
        return name

    def move_parameters(self, device: torch.device) -> None:
        self.module.to(device)
