"""The plan of a run: placement, batch arithmetic, memory. Made before anything starts, written to `plan.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dovetail.config.plan.batches import BatchPlan, make_batches
from dovetail.config.plan.layout import RoleLayout, make_layouts, plan_device
from dovetail.config.plan.memory import MemoryPlan, make_memory
from dovetail.config.plan.model_shape import ModelShape, Shapes
from dovetail.config.root import DovetailConfig


@dataclass(frozen=True)
class ModelSummary:
    """The policy network in a few numbers."""

    path: str
    model_type: str
    parameters: int
    active_parameters: int
    parts: dict[str, int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    context_length: int | None
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Plan:
    """Everything that can be said about a run before it starts."""

    layouts: tuple[RoleLayout, ...]
    batches: BatchPlan
    model: ModelSummary | None
    memory: MemoryPlan | None
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is computed from others is written out too."""
        plain = asdict(self)
        if self.memory is not None:
            plain["memory"]["fits"] = self.memory.fits
            for phase, written in zip(self.memory.phases, plain["memory"]["phases"], strict=True):
                written["total"], written["fits"] = phase.total, phase.fits
            for stage, written in zip(self.memory.stages, plain["memory"]["stages"], strict=True):
                written["total"] = stage.total
        return plain


def make_plan(
    config: DovetailConfig, shapes: Shapes | ModelShape | None = None, *, device_memory_gib: float | None = None
) -> Plan:
    """Resolve a checked config into a plan. `shapes` comes from `read_shapes`; one shape serves policy and critic."""
    if not isinstance(shapes, Shapes):
        shapes = Shapes(policy=shapes, critic=shapes if config.uses_critic else None)
    layouts = make_layouts(config)
    batches = make_batches(config, layouts)
    device = plan_device(config, device_memory_gib)
    return Plan(
        layouts=tuple(layouts.values()),
        batches=batches,
        model=_summary(config.actor_rollout_ref.model.config_path, shapes.policy),
        memory=make_memory(config, layouts, batches, shapes, device),
        notices=shapes.notices,
    )


def _summary(path: str, shape: ModelShape | None) -> ModelSummary | None:
    if shape is None:
        return None
    return ModelSummary(path, **{each.name: getattr(shape, each.name) for each in fields(ModelSummary)[1:]})
