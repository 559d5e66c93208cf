"""FSDP1 (``FullyShardedDataParallel``) behind the same operations as FSDP2. Knows no loss.

Parameters keep their names and identities (``use_orig_params``), so optimizer groups and LoRA work as elsewhere; each
rank's original parameter is a flat slice of its unit, whole again only inside ``summon_full_params``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dovetail.backends.sharding import Precision, Sharding, is_meta, sharding_units
from dovetail.config.fsdp import FSDPConfig
from dovetail.models.load import initialize_buffers, materialize
from dovetail.models.weights import load_weights
from dovetail.parallel.mesh import ParallelMesh

_PREFIX = "_fsdp_wrapped_module."

_STRATEGIES = {
    # (hybrid, reshard after forward)
    (False, True): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class Fsdp1Sharding(Sharding):
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
        self._is_mixed = precision.is_mixed
        self._offloads = config.offload_policy
        self._mesh = mesh.fsdp
        # Shapes and names only: what reads checkpoint files needs the model as it was before wrapping.
        self._shapes = copy.deepcopy(module) if is_meta(module) else None
        for unit in sharding_units(module, config.wrap_policy):
            _allocate(unit, device)
            _replace(module, unit, FSDP(unit, **self._settings))
        _allocate(module, device)
        if self._shapes is not None:
            initialize_buffers(module)
        self.module = self._root = FSDP(module, **self._settings)
        self.reduce_factor = mesh.world_size

    @torch.no_grad()
    def load_weights(self, path: Path, adapter: Path | None = None) -> None:
        if self._shapes is None:
            raise ValueError("FSDP1 loads weights only into a network built on the meta device (build_meta_model)")
        # Flat parameters cannot be filled by name. DTensors can: read into a second set of shards, then hand it over.
        shards, self._shapes = self._shapes, None
        fully_shard(shards, mesh=self._mesh)
        materialize(shards, self._device)
        load_weights(shards, path, adapter=adapter)
        set_model_state_dict(self.module, dict(get_model_state_dict(shards)))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            yield self.plain_name(name), parameter

    def accumulating(self) -> AbstractContextManager[object]:
        # `no_sync` adds micro-batches up in the type that computes: bfloat16 has 8 bits. Reduced each time, they are
        # added up as shards in the type of the weights. Alone there is nothing to reduce.
        return nullcontext() if self._is_mixed or self.reduce_factor == 1 else self._root.no_sync()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return self._root.clip_grad_norm_(max_norm)

    def full_tensors(
        self, *, gradients: bool = False, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        seen: set[str] = set()
        for prefix, unit in self.module.named_modules():
            if not isinstance(unit, FSDP):
                continue
            with (
                self._on_device(unit),
                FSDP.summon_full_params(unit, recurse=False, writeback=False, with_grads=gradients),
            ):
                for name, parameter in _own_parameters(unit, prefix):
                    tensor = parameter.grad if gradients else parameter.detach()
                    if gradients and not parameter.requires_grad:
                        continue  # a part of the unit's flat gradient, with zeros in it
                    if wanted is not None and not wanted(name):
                        continue
                    if name not in seen and tensor is not None:
                        seen.add(name)
                        # A copy: the gathered storage is freed below, and must not be a view that a consumer keeps
                        # or shares with numpy.
                        yield name, tensor.clone()

    def plain_name(self, name: str) -> str:
        return name.replace(_PREFIX, "")

    def move_parameters(self, device: torch.device) -> None:
        if self._offloads:
            return
        for unit in FSDP.fsdp_modules(self.module):
            _move_unit(unit, device)

    @contextmanager
    def _on_device(self, unit: FSDP) -> Iterator[None]:
        """Bring an offloaded unit in for as long as it is gathered."""
        handle = unit._handle
        away = handle is not None and not self._offloads and handle.flat_param.device.type != self._device.type
        if away:
            _move_unit(unit, self._device)
        try:
            yield
        finally:
            if away:
                _move_unit(unit, torch.device("cpu"))


def _move_unit(unit: FSDP, device: torch.device) -> None:
    handle = unit._handle
    if handle is not None:
        # No public call moves a flat parameter; the local shard must stay the same storage as its data.
        handle.flat_param_to(device, non_blocking=False)
        handle.flat_param._local_shard = handle.flat_param.data


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Memory for the meta parameters and buffers that no inner unit manages; a tied parameter stays one."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                new = made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
                setattr(owner, name, new)
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(owner, name, torch.empty_like(buffer, device=device))


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
            yield f"{prefix}.{name}".removeprefix("."), parameter
