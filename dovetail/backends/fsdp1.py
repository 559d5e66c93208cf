"""FSDP1 (``FullyShardedDataParallel``) behind the same operations as FSDP2. Knows no loss.

Parameters keep their names and identities (``use_orig_params``), so optimizer groups and LoRA work as elsewhere; each
rank's original parameter is a flat slice of its unit, whole again only inside ``summon_full_params``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dovetail.backends.sharding import Precision
from dovetail.backends.units import sharding_units
from dovetail.config.fsdp import FSDPConfig
from dovetail.parallel.mesh import ParallelMesh

_PREFIX = "_fsdp_wrapped_module."

_STRATEGIES = {
    # (hybrid, reshard after forward)
    (False, True): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class Fsdp1Sharding:
    """A module wrapped unit by unit."""

    def __init__(
        self, module: nn.Module, precision: Precision, device: torch.device, mesh: ParallelMesh, config: FSDPConfig
    ) -> None:
        self._device = device
        self._settings = {
            "device_mesh": mesh.fsdp,
            "sharding_strategy": _STRATEGIES[mesh.is_hybrid, config.reshard_after_forward],
            "mixed_precision": MixedPrecision(
                param_dtype=precision.compute, reduce_dtype=precision.reduce, buffer_dtype=torch.float32
            ),
            "cpu_offload": CPUOffload(offload_params=config.offload_policy),
            "forward_prefetch": config.forward_prefetch,
            "use_orig_params": True,
            "device_id": device,
        }
        self._offloads = config.offload_policy
        for unit in sharding_units(module, config.wrap_policy):
            _replace(module, unit, FSDP(unit, **self._settings))
        self.module = FSDP(module, **self._settings)
        self.reduce_factor = mesh.world_size

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            yield name.replace(_PREFIX, ""), parameter

    def compute_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def accumulating(self) -> AbstractContextManager[object]:
        return self.module.no_sync()

    def after_forward(self) -> None:
        return None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return self.module.clip_grad_norm_(max_norm)

    def full_tensors(self, *, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        seen: set[str] = set()
        for prefix, unit in self.module.named_modules():
            if not isinstance(unit, FSDP):
                continue
            with FSDP.summon_full_params(unit, recurse=False, writeback=False, with_grads=gradients):
                for name, parameter in _own_parameters(unit, prefix):
                    tensor = parameter.grad if gradients else parameter.detach()
                    if name not in seen and tensor is not None:
                        seen.add(name)
                        # A copy: the gathered storage is freed below, and must not be a view that a consumer keeps
                        # or shares with numpy.
                        yield name, tensor.clone()

    def move_parameters(self, device: torch.device) -> None:
        if self._offloads:
            return
        for unit in FSDP.fsdp_modules(self.module):
            handle = unit._handle
            if handle is not None:
                # No public call moves a flat parameter; the local shard must stay the same storage as its data.
                handle.flat_param_to(device, non_blocking=False)
                handle.flat_param._local_shard = handle.flat_param.data


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is old and parent is not new:
                setattr(parent, name, new)
                return
    raise AssertionError(f"{type(old).__name__} is not a part of {type(root).__name__}")


def _own_parameters(unit: FSDP, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of this unit that no inner unit manages, under names from the root."""
    inner = tuple(name for name, module in unit.named_modules() if isinstance(module, FSDP) and module is not unit)
    for name, parameter in nn.Module.named_parameters(unit):
        if not any(name.startswith(f"{other}.") for other in inner):
            yield f"{prefix}.{name}".replace(_PREFIX, "").removeprefix("."), parameter
