"""Megatron's optimizer, one step at a time: norm, decision, clipping, update. Knows no schedule and no loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dovetail.backends.megatron import settings
from dovetail.backends.megatron.host_copies import storage_id
from dovetail.backends.megatron.parts import MegatronModel
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig


class MegatronStepper:
    """Steps all parameters of a model, dense and experts, sharded over data-parallel ranks or not."""

    def __init__(self, model: MegatronModel, optim: OptimConfig, config: MegatronConfig, max_grad_norm: float) -> None:
        self._max_grad_norm = max_grad_norm
        self.optimizer: Any = get_megatron_optimizer(
            settings.optimizer_config(optim, config, max_grad_norm), list(model.wrapped)
        )
        for group in self.optimizer.param_groups:
            # Megatron leaves this to its own scheduler: until that has run, norms and biases would be decayed too.
            group["weight_decay"] = optim.weight_decay * group["wd_mult"]

    @torch.no_grad()
    def step(self) -> float:
        """Clip and step; return the norm of the whole model's gradient. One that is not finite changes nothing."""
        self.optimizer.prepare_grads()
        # Reduced over all ranks, so all of them take the same decision.
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            if self._max_grad_norm > 0:
                for part in self._parts():
                    if parameters := part.get_parameters():
                        clip_grad_by_total_norm_fp32(parameters, max_norm=self._max_grad_norm, total_norm=norm)
            self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()
        return norm

    def state_tensors(self, weights: Iterable[Tensor]) -> Iterator[Tensor]:
        """Moments and float32 master weights; not what shares the memory of the model's `weights`."""
        shared = {storage_id(weight) for weight in weights}
        for part in self._parts():
            tensors = [*part.get_parameters()]
            for state in part.optimizer.state.values() if part.optimizer is not None else ():
                tensors += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
            for tensor in tensors:
                if storage_id(tensor) not in shared:
                    yield tensor

    def _parts(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))
