"""Whether a KV cache may stay on the device while the trainer works there, by what the plan says of training.

Freeing the cache costs time: graphs over it are captured again, and torch must allocate all activations from the
CUDA driver again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.config.plan import ModelShapeError, make_plan, read_shapes
from dovetail.config.root import DovetailConfig

_MARGIN = 0.1  # of the device: the plan is within a few percent where it was measured, and other models are not
_GRAPHS = 2 << 30
_NOT_TRAINING = ("rollout", "weight sync")


@dataclass(frozen=True)
class CacheRoom:
    """`training_bytes` is what the plan gives the largest phase of training on this device."""

    device: torch.device
    training_bytes: float

    @classmethod
    def beside_training(cls, config: DovetailConfig, device: torch.device) -> CacheRoom | None:
        """None where the cache must be freed: `free_cache_engine` says so, the device is the CPU, parameters are
        offloaded, or the plan does not know the model."""
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        if rollout.free_cache_engine or device.type != "cuda" or actor.offloading.param_offload:
            return None
        try:
            plan = make_plan(config, read_shapes(config))
        except ModelShapeError:
            return None
        pool = next(layout.pool for layout in plan.layouts if layout.role == "actor")
        phases = plan.memory.phases if plan.memory is not None else ()
        needs = [phase.needed for phase in phases if phase.pool == pool and phase.name not in _NOT_TRAINING]
        return cls(device, max(needs)) if needs else None

    def holds(self, cache_bytes: int) -> bool:
        """Whether both fit into what other processes leave of the device."""
        free, total = torch.cuda.mem_get_info(self.device)
        return self.fits(cache_bytes, free + torch.cuda.memory_reserved(self.device), total)

    def fits(self, cache_bytes: int, ours: int, total: int) -> bool:
        return self.training_bytes + cache_bytes + _GRAPHS <= ours - _MARGIN * total
