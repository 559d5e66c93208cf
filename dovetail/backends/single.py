"""One process, no wrapper: the laptop default, and the reference every sharding is compared with.

In mixed precision two sets of parameters are held: the ones that compute, which the embedded engine reads in place, and
the masters, which the optimizer steps and checkpoints hold. Gradients are added up on the masters, in their dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dovetail.backends.sharding import Precision, Sharding, is_meta
from dovetail.models.load import materialize


class SingleProcess(Sharding):
    """The module as it is, or two of it in mixed precision."""

    is_unsharded = True

    def __init__(
        self, module: nn.Module, precision: Precision, device: torch.device, mesh: None = None, config: object = None
    ) -> None:
        if is_meta(module):
            materialize(module, device)
        self.module = module.to(device)
        self._masters: nn.Module | None = None
        self._precision = precision
        self._device = device
        # Frozen weights under adapters need no second set: they are cast where they are used.
        if precision.is_mixed and all(parameter.requires_grad for parameter in module.parameters()):
            self._separate_masters()

    @property
    def state_module(self) -> nn.Module:
        return self.module if self._masters is None else self._masters

    def compute_context(self) -> AbstractContextManager[object]:
        if not self._precision.is_mixed or self._masters is not None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision.compute)

    @torch.no_grad()
    def state_changed(self) -> None:
        if self._masters is not None:
            torch._foreach_copy_(list(self.module.parameters()), list(self._masters.parameters()))

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

    def move_parameters(self, device: torch.device) -> None:
        self.module.to(device)
        self.state_module.to(device)

    def _separate_masters(self) -> None:
        # One set of buffers for both: what loads the masters' (the bias of a sigmoid router) is for those that compute.
        shared = {id(part._buffers): part._buffers for part in self.module.modules()}
        self._masters = copy.deepcopy(self.module, shared)
        for parameter, master in zip(self.module.parameters(), self._masters.parameters(), strict=True):
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
