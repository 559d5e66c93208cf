"""Memory per device in each phase of a step, and whether it fits. Formulas and assumptions: docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.config.plan.activations import (
    forward_activations,
    fused_head_bytes,
    kept_activations,
    logits_bytes,
    recomputed_activations,
)
from dovetail.config.plan.batches import PassBatches
from dovetail.config.plan.devices import GIB, Device
from dovetail.config.plan.engine_memory import EngineMemory
from dovetail.config.plan.role_memory import RoleMemory
from dovetail.config.plan.states import stage_parameters

ITEMS = ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "engine", "waiting roles", "runtime")


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the fullest device during one phase."""

    name: str
    pool: str
    items: dict[str, float]
    device_bytes: float
    # The pipeline stage of that device; None without pipeline parallelism.
    stage: int | None = None
    # Set when the phase cannot run even though the sum is below the device's memory.
    obstacle: str | None = None

    @property
    def total(self) -> float:
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        return self.obstacle is None and self.total <= self.device_bytes

    @property
    def largest(self) -> str:
        return max(self.items, key=lambda item: self.items[item])


@dataclass(frozen=True)
class StageMemory:
    """One pipeline stage of a role on Megatron: what each of its devices holds, and needs during an update.

    Devices of a stage hold equal amounts; those of one expert-parallel group hold different experts.
    """

    role: str
    stage: int
    layers: tuple[int, ...]
    expert_layers: int
    experts_per_device: int
    dense_parameters: float
    expert_parameters: float
    items: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.items.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Every phase, and host memory for what waits outside the devices."""

    device: str
    device_bytes: float
    phases: tuple[PhaseMemory, ...]
    host_bytes_per_node: float
    cached_tokens: int
    full_sequences: float
    verdict: str
    advice: tuple[str, ...] = field(default=())
    # Of the roles that train on Megatron.
    stages: tuple[StageMemory, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)


def training_phase(
    name: str, role: str, roles: dict[str, RoleMemory], batch: PassBatches, rest: float, device: Device
) -> PhaseMemory:
    """A phase in which `role` computes; `rest` is what the engine leaves on the device."""
    return max(training_stages(name, role, roles, batch, rest, device), key=lambda phase: phase.total)


def training_stages(
    name: str, role: str, roles: dict[str, RoleMemory], batch: PassBatches, rest: float, device: Device
) -> list[PhaseMemory]:
    """The same phase on the devices of every pipeline stage."""
    stages = range(roles[role].layout.pipeline_parallel)
    return [_training_stage(name, role, roles, batch, stage, rest, device) for stage in stages]


def stage_memory(active: RoleMemory, phases: list[PhaseMemory]) -> list[StageMemory]:
    """Every pipeline stage of a role with its part of the model, from its phases of an update."""
    shape, layout = active.shape, active.layout
    held = layout.stages(shape.num_layers)
    return [
        StageMemory(
            role=layout.role,
            stage=index,
            layers=held[index],
            expert_layers=sum(shape.layers[layer].is_moe for layer in held[index]),
            experts_per_device=shape.num_experts // layout.expert_parallel,
            dense_parameters=parameters.dense,
            expert_parameters=parameters.experts,
            items=phase.items,
        )
        for index, (parameters, phase) in enumerate(zip(stage_parameters(shape, layout), phases, strict=True))
    ]


def rollout_phase(engine: EngineMemory, roles: dict[str, RoleMemory], pool: str, device: Device) -> PhaseMemory:
    """Generation: the engine, and what the training roles leave on the same device."""
    obstacle = None
    if not engine.fits:
        need = engine.cache_per_token * engine.max_length
        obstacle = (
            f"one sequence of {engine.max_length:,} tokens needs {need / GIB:.1f} GiB of KV cache and "
            f"{engine.cache / GIB:.1f} GiB are left of the engine's {engine.budget / GIB:.1f} GiB"
        )
    items = {
        "KV cache": engine.cache,
        "engine": engine.weights + engine.workspace,
        "waiting roles": _waiting(roles, skip=None, stage=None),
        "runtime": device.runtime_bytes,
    }
    return PhaseMemory("rollout", pool, _all_items(items), device.memory_bytes, obstacle=obstacle)


def sync_phase(
    engine: EngineMemory, roles: dict[str, RoleMemory], bucket: float, device: Device, *, shared: bool
) -> PhaseMemory:
    """Weights on their way: the trainer's, a bucket sent and received, and the engine's where it shares the device."""
    actor = roles["actor"]
    states = max(actor.stages, key=lambda stage: stage.weights)
    optimizer = 0.0 if actor.optimizer_waits_on_host or actor.always_on_host else states.optimizer
    items = {
        "weights": 0.0 if actor.always_on_host else states.weights,
        "optimizer": optimizer,
        "engine": (engine.weights if shared else 0.0) + 2 * bucket,
        "waiting roles": _waiting(roles, skip="actor", stage=states.stage),
        "runtime": device.runtime_bytes,
    }
    return PhaseMemory("weight sync", actor.layout.pool, _all_items(items), device.memory_bytes)


def _training_stage(
    name: str,
    role: str,
    roles: dict[str, RoleMemory],
    batch: PassBatches,
    stage: int,
    rest: float,
    device: Device,
) -> PhaseMemory:
    active = roles[role]
    states, shape, layout = active.at(stage), active.shape, active.layout
    tokens = batch.tokens_per_device
    weights = (0.0 if active.always_on_host else states.weights) + states.gathered
    logits = _head_bytes(active, tokens, device, training=batch.trains) if states.holds_head else 0.0
    if batch.trains:
        activations = _training_activations(active, stage, batch, logits)
        gradients = 0.0 if active.always_on_host else states.gradients
        # The gradient of one unit before it is cut over the ranks.
        gradients += states.largest_unit * active.reduce_bytes if layout.shard_size > 1 else 0.0
        optimizer = 0.0 if active.always_on_host else states.optimizer
    else:
        # The head comes after the layers: of the two, only the larger is alive at the peak.
        activations = max(0.0, forward_activations(shape, layout, tokens) - logits)
        gradients = states.gradients if layout.is_megatron and not active.gradients_wait_on_host else 0.0
        optimizer = 0.0 if active.optimizer_waits_on_host or active.always_on_host else states.optimizer
    items = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
        "logits": logits,
        "engine": rest,
        "waiting roles": _waiting(roles, skip=role, stage=stage),
        "runtime": device.runtime_bytes,
    }
    pool = layout.pool
    return PhaseMemory(
        name, pool, _all_items(items), device.memory_bytes, stage=stage if layout.pipeline_parallel > 1 else None
    )


def _training_activations(active: RoleMemory, stage: int, batch: PassBatches, logits: float) -> float:
    tokens = batch.tokens_per_device
    kept = kept_activations(
        active.shape,
        active.layout,
        stage,
        tokens,
        micro_batches=batch.micro_batches,
        checkpointing=active.checkpointing,
        offload=active.activation_offload,
        compiled=active.compiled,
    )
    if not active.checkpointing:
        return kept
    # Backward frees the logits before it recomputes the last layer: the smaller of the two hides behind the larger.
    again = recomputed_activations(active.shape, active.layout, stage, tokens, compiled=active.compiled)
    return kept + max(0.0, again - logits)


def _head_bytes(active: RoleMemory, tokens: float, device: Device, *, training: bool) -> float:
    shape, layout = active.shape, active.layout
    if active.fused_head:
        return fused_head_bytes(shape, layout, tokens, training=training, accelerator=device.is_accelerator)
    return logits_bytes(shape, layout, tokens, training=training, entropy=active.needs_entropy)


def _waiting(roles: dict[str, RoleMemory], *, skip: str | None, stage: int | None) -> float:
    total = 0.0
    for name, role in roles.items():
        if name == skip:
            continue
        if stage is None:
            total += max(role.waiting(index) for index in range(len(role.stages)))
        else:
            total += role.waiting(stage)
    return total


def _all_items(items: dict[str, float]) -> dict[str, float]:
    return {name: items.get(name, 0.0) for name in ITEMS}
