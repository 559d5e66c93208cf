"""One process, no wrapper: the laptop default, and the reference every sharding is compared with.

In mixed precision two sets of parameters are held: the ones that compute, which the embedded engine reads in place, and
the masters, which the optimizer steps and checkpoints hold. Gradients are added up on the masters, in their dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from dovetail.backends.sharding import Precision, is_meta
from dovetail.models.load import materialize
from dovetail.models.weights import load_weights


class SingleProcess:
    """The module as it is, or two of it in mixed precision."""

    reduce_factor = 1
    is_unsharded = True

    def __init__(
        self, module: nn.Module, precision: Precision, device: torch.device, mesh: None = None, config: object = None
    ) -> None:
        if is_meta(module):
            materialize(module, device)
        self.module = self.state_module = module.to(device)
        self._precision = precision
        self._device = device
        # Frozen weights under adapters need no second set: they are cast where they are used.
        if precision.is_mixed and all(parameter.requires_grad for parameter in module.parameters()):
            self._separate_masters()

    def load_weights(self, path: Path) -> None:
        load_weights(self.state_module, path)
        self.state_changed()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.state_module.named_parameters()

    def compute_context(self) -> AbstractContextManager[object]:
        if not self._precision.is_mixed or self._has_masters:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision.compute)

    def accumulating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after_forward(self) -> None:
        return None

    @torch.no_grad()
    def state_changed(self) -> None:
        if self._has_masters:
            torch._foreach_copy_(list(self.module.parameters()), list(self.state_module.parameters()))

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.state_module.parameters(), max_norm)

    def full_tensors(
        self, *, gradients: bool = False, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.state_module.named_parameters():
            if wanted is not None and not wanted(name):
                continue
            if not gradients:
                yield name, parameter.detach()
            elif parameter.grad is not None:
                yield name, parameter.grad

    def plain_name(self, name: str) -> str:
        return name

    def move_parameters(self, device: torch.device) -> None:
        self.module.to(device)
        self.state_module.to(device)

    @property
    def _has_masters(self) -> bool:
        return self.state_module is not self.module

    def _separate_masters(self) -> None:
        self.state_module = copy.deepcopy(self.module)
        for parameter, master in zip(self.module.parameters(), self.state_module.parameters(), strict=True):
            parameter.data = parameter.data.to(self._precision.compute)
            parameter.register_post_accumulate_grad_hook(_adding_to(master))


def _adding_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return add
