"""Megatron's optimizer, one step at a time, its gradient buffers, and tensors that wait in host memory. Knows no loss.

Gradient buffers are freed between updates. What is offloaded is the memory behind tensors, not the tensors: Megatron's
parameters, their gradients and the optimizer's shards are views of a few large buffers, and every view stays what it
was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dovetail.backends.megatron import settings
from dovetail.backends.megatron.parts import MegatronModel
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig


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


class GradientBuffers:
    """The flat buffers behind `parameter.main_grad`. With `frees` they exist from backward to the optimizer's step
    only; a gradient is not worth a copy on the host, it is made anew."""

    def __init__(self, model: MegatronModel, *, frees: bool) -> None:
        self._chunks: list[Any] = list(model.wrapped)
        self._frees = frees
        self._sizes: dict[int, int] = {}

    def clear(self) -> None:
        """Zeros, in memory that is there again."""
        for index, buffer in enumerate(self._buffers()):
            if index in self._sizes:
                buffer.grad_data.untyped_storage().resize_(self._sizes.pop(index))
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def release(self) -> None:
        """After the step."""
        if not self._frees:
            return
        for index, buffer in enumerate(self._buffers()):
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes():
                self._sizes[index] = storage.nbytes()
                storage.resize_(0)

    def gather(self) -> None:
        """Whole gradients on every rank: the distributed optimizer leaves each rank its own part of them."""
        for chunk in self._chunks:
            if not chunk.ddp_config.use_distributed_optimizer:
                continue
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    _gather_bucket(bucket.grad_data, ranks)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from [*chunk.buffers, *chunk.expert_parallel_buffers]


def _gather_bucket(data: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        own = data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(data, own, group=group)


def read_gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Of a parameter in Megatron's data parallelism."""
    return parameter.main_grad  # pyrefly: ignore[missing-attribute]


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
