"""FSDP2: every parameter is a DTensor, sharded on its first dimension, gathered layer by layer.

One shard group, or several that hold a replica each (hybrid sharding), according to the mesh. Knows no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dovetail.backends.sharding import Precision, Sharding, is_meta, sharding_units
from dovetail.config.fsdp import FSDPConfig
from dovetail.models.load import materialize
from dovetail.parallel.mesh import ParallelMesh


def apply_fsdp2(model: nn.Module, fsdp_kwargs: Mapping[str, Any], config: FSDPConfig) -> nn.Module:
    """``fully_shard`` every unit of the model (layers, untied embeddings), then the model itself, in place.

    ``fsdp_kwargs`` go to ``fully_shard`` unchanged (mesh, mp_policy, offload_policy, reshard_after_forward).
    """
    for unit in sharding_units(model, config.wrap_policy):
        fully_shard(unit, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)
    if config.forward_prefetch:
        units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit, following in pairwise(units[1:]):
            unit.set_modules_to_forward_prefetch([following])
    return model


@torch.no_grad()
def fsdp2_clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm before.

    The norm is a plain tensor, equal on every rank. Gradients may be on the host (CPU offload): the one number per rank
    that is communicated goes through ``device``, the one the process group works on.
    """
    if norm_type not in (2.0, float("inf")):
        raise ValueError(f"norm_type={norm_type} is not supported; use 2.0 or inf")
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    largest = norm_type == float("inf")
    total: Tensor | None = None
    # Replicas hold equal gradients: only the groups over which a gradient is split are added up.
    for groups, shards in _by_shard_groups(grads).items():
        part = torch.zeros((), device=device or shards[0].device)
        held = [shard.float() for shard in shards if shard.numel()]
        if held:  # a rank may hold nothing of small tensors
            stacked = torch.stack([norm.to(part.device) for norm in torch._foreach_norm(held, norm_type)])
            part = stacked.max() if largest else stacked.square().sum()
        for group in groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total = part if total is None else (torch.maximum(total, part) if largest else total + part)
    if total is None:
        return torch.zeros((), device=device)
    norm = total if largest else total.sqrt()
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradient norm is {float(norm)}; pass error_if_nonfinite=False to get it back instead")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(device=local.device, dtype=local.dtype))
    return norm


class Fsdp2Sharding(Sharding):
    """A module sharded in place by ``apply_fsdp2``."""

    def __init__(
        self, module: nn.Module, precision: Precision, device: torch.device, mesh: ParallelMesh, config: FSDPConfig
    ) -> None:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload_policy else OffloadPolicy()
        apply_fsdp2(
            module,
            {
                "mesh": mesh.fsdp,
                "mp_policy": MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce),
                "offload_policy": offload,
                "reshard_after_forward": config.reshard_after_forward,
            },
            config,
        )
        if is_meta(module):
            # After sharding, so that this rank allocates its shards and nothing else.
            materialize(module, torch.device("cpu") if config.offload_policy else device)
        self.module = module
        # The reduction averages over all ranks of the mesh, also over those that share a sequence: each of them holds
        # the gradient of its own tokens only, so the sum over all ranks is what is wanted.
        self.reduce_factor = mesh.world_size
        self._device = device
        self._offloads = config.offload_policy

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        root = self.module
        assert isinstance(root, FSDPModule), "the root was sharded when this object was built"
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def after_forward(self) -> None:
        # A unit that keeps its gathered weights would use them again after the optimizer has changed the shards.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return fsdp2_clip_grad_norm_(self.module.parameters(), max_norm, device=self._device)

    def full_tensors(
        self, *, gradients: bool = False, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.after_forward()
        for name, parameter in self.module.named_parameters():
            tensor = parameter.grad if gradients else parameter.detach()
            if tensor is None or (wanted is not None and not wanted(name)):
                continue
            tensor = tensor.to(self._device)
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def move_parameters(self, device: torch.device) -> None:
        if not self._offloads:
            self.module.to(device)


def _by_shard_groups(grads: Collection[Tensor]) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    """Local gradients by the process groups they are split over; the empty tuple holds whole ones."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            mesh, placements = grad.device_mesh, grad.placements
            groups = tuple(mesh.get_group(axis) for axis, kind in enumerate(placements) if isinstance(kind, Shard))
            by_groups.setdefault(groups, []).append(grad.to_local())
        else:
            by_groups.setdefault((), []).append(grad)
    return by_groups
