"""Memory per device in each phase of a step, and whether it fits. Formulas and assumptions: docs/plan.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dovetail.config.fsdp import full_dtype
from dovetail.config.plan.advice import advise
from dovetail.config.plan.batches import BatchPlan, PassBatches
from dovetail.config.plan.engine_memory import EngineMemory, engine_memory
from dovetail.config.plan.layout import Device, RoleLayout
from dovetail.config.plan.model_shape import Shapes
from dovetail.config.plan.role_memory import RoleMemory, role_memories, teacher_layer_bytes
from dovetail.config.root import DovetailConfig
from dovetail.config.units import GIB

ITEMS = ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "engine", "waiting roles", "runtime")
MIB = 1024**2
# What a sleeping engine keeps: its process, graphs and buffers that are not tagged as weights or cache.
SLEEPING_ENGINE = 1.0 * GIB


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
    # Of the total, what is taken only because it is free: the gradient that the fused head keeps.
    optional: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.items.values())

    @property
    def needed(self) -> float:
        return self.total - self.optional

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


def make_memory(
    config: DovetailConfig, layouts: dict[str, RoleLayout], batches: BatchPlan, shapes: Shapes, device: Device
) -> MemoryPlan | None:
    """Memory of every phase; None when the shape of the policy, or of what is trained in its place, is not known."""
    if (shapes.policy if "actor" in layouts else shapes.critic) is None:
        return None
    memory = _Memory(config, layouts, batches, shapes, device)
    phases = memory.phases()
    passes = {batch.name: batch for batch in batches.passes}
    advice = []
    for phase in phases:
        if not phase.fits:
            batch = passes.get(phase.name)
            ranks = layouts[batch.role].ranks_per_sequence if batch else 1
            advice.append(advise(config, phase, batch, batches.max_sequence_length / ranks))
    return MemoryPlan(
        device=device.name,
        device_bytes=device.memory_bytes,
        phases=tuple(phases),
        host_bytes_per_node=sum(role.host_bytes() for role in memory.roles.values()) * config.trainer.n_gpus_per_node,
        cached_tokens=memory.engine.cached_tokens if memory.engine else 0,
        full_sequences=memory.engine.full_sequences if memory.engine else 0.0,
        verdict=_verdict(phases, device),
        advice=tuple(advice),
        stages=tuple(memory.stages()),
    )


class _Memory:
    """Which phases a step has and who waits in each."""

    def __init__(
        self, config: DovetailConfig, layouts: dict[str, RoleLayout], batches: BatchPlan, shapes: Shapes, device: Device
    ) -> None:
        self.rollout = config.actor_rollout_ref.rollout
        self.layouts, self.batches, self.device = layouts, batches, device
        self.roles = role_memories(config, layouts, shapes, device)
        self.teacher_layer = teacher_layer_bytes(config, shapes)
        self.engine: EngineMemory | None = None
        if "rollout" in layouts:
            assert shapes.policy is not None, "the memory plan needs the policy's shape"
            self.engine = engine_memory(
                shapes.policy,
                layouts["rollout"],
                self.rollout,
                device=device,
                sequences_per_replica=batches.sequences_per_engine
                * max(1.0, config.groups_in_flight / config.generation_batch_size)
                / self.rollout.data_parallel_size,
                shares_weights=_shares_weights(config, layouts),
            )

    def phases(self) -> list[PhaseMemory]:
        """Every phase on the devices that it fills most."""
        phases = [] if self.engine is None else [self._rollout_phase(self.engine)]
        for batch in self.batches.passes:
            # With LoRA the actor computes the reference's log-probs.
            role = "actor" if batch.role == "ref" and "ref" not in self.roles else batch.role
            if role in self.roles:
                phases.append(max(self._training_stages(role, batch), key=lambda phase: phase.total))
        return phases if self.engine is None else [*phases, self._sync_phase(self.engine)]

    def stages(self) -> Iterator[StageMemory]:
        """Every pipeline stage of the roles that train on Megatron, with its part of the model."""
        for batch in self.batches.passes:
            active = self.roles.get(batch.role)
            if active is None or not batch.trains or not active.layout.is_megatron:
                continue
            shape, layout = active.shape, active.layout
            held = layout.stages(shape.num_layers)
            for states, phase in zip(active.stages, self._training_stages(batch.role, batch), strict=True):
                yield StageMemory(
                    role=layout.role,
                    stage=states.stage,
                    layers=held[states.stage],
                    expert_layers=sum(shape.layers[layer].is_moe for layer in held[states.stage]),
                    experts_per_device=shape.num_experts // layout.expert_parallel,
                    dense_parameters=states.dense,
                    expert_parameters=states.experts,
                    items=phase.items,
                )

    def _rollout_phase(self, engine: EngineMemory) -> PhaseMemory:
        """Generation: the engine, and what the training roles leave on the same device."""
        pool, obstacle = self.layouts["rollout"].pool, None
        if not engine.fits:
            need = engine.cache_per_token * engine.max_length
            obstacle = (
                f"one sequence of {engine.max_length:,} tokens needs {need / GIB:.1f} GiB of KV cache and "
                f"{engine.cache / GIB:.1f} GiB are left of the engine's {engine.budget / GIB:.1f} GiB"
            )
        items = {"KV cache": engine.cache, "engine": engine.weights + engine.workspace}
        return self._phase("rollout", pool, items, active="", obstacle=obstacle)

    def _training_stages(self, role: str, batch: PassBatches) -> list[PhaseMemory]:
        """A phase in which `role` computes, on the devices of every pipeline stage."""
        active, rest = self.roles[role], 0.0
        layout = active.layout
        if self.engine is not None and layout.pool == self.layouts["rollout"].pool:
            # What the engine leaves on the device.
            if self.rollout.free_cache_engine is False:
                rest = self.engine.weights + self.engine.workspace + self.engine.cache
            elif self.device.is_accelerator and self.rollout.name != "native":
                rest = SLEEPING_ENGINE

        def of_stage(stage: int, *, keeps_gradient: bool) -> PhaseMemory:
            items = active.computing(stage, batch, self.device, keeps_gradient=keeps_gradient)
            shown = stage if layout.pipeline_parallel > 1 else None
            return self._phase(batch.name, layout.pool, {**items, "engine": rest}, active=role, at=stage, stage=shown)

        phases = [of_stage(stage, keeps_gradient=False) for stage in range(layout.pipeline_parallel)]
        if not (batch.trains and active.may_keep_gradient):
            return phases
        keeping = [of_stage(stage, keeps_gradient=True) for stage in range(layout.pipeline_parallel)]
        # As much as the head takes stays free beside it.
        return [
            replace(kept, optional=kept.total - phase.total)
            if kept.total + kept.items["logits"] <= kept.device_bytes
            else phase
            for phase, kept in zip(phases, keeping, strict=True)
        ]

    def _sync_phase(self, engine: EngineMemory) -> PhaseMemory:
        """Weights on their way: the trainer's, a bucket sent and received, and the engine's where it shares devices."""
        actor, shared = self.roles["actor"], self.layouts["rollout"].pool == self.layouts["actor"].pool
        states = max(actor.stages, key=lambda stage: stage.weights)
        items = {
            "weights": 0.0 if actor.always_on_host else states.weights,
            "optimizer": actor.waiting(states)["optimizer"],
            "engine": shared * engine.weights + 2 * self.rollout.update_weights_bucket_megabytes * MIB,
        }
        return self._phase("weight sync", actor.layout.pool, items, active="actor", at=states.stage)

    def _phase(
        self,
        name: str,
        pool: str,
        items: dict[str, float],
        *,
        active: str,
        at: int | None = None,
        stage: int | None = None,
        obstacle: str | None = None,
    ) -> PhaseMemory:
        """A phase of the role `active`, beside the other roles of the pool at stage `at` and the runtime."""
        mates: list[RoleMemory] = [r for name, r in self.roles.items() if name != active and r.layout.pool == pool]
        waiting = sum((role.all_waiting(at) for role in mates), 0.0)
        waiting += self.teacher_layer if "actor" in self.layouts and self.layouts["actor"].pool == pool else 0.0
        items = {**items, "waiting roles": waiting, "runtime": self.device.runtime_bytes}
        every_item = {item: items.get(item, 0.0) for item in ITEMS}
        return PhaseMemory(name, pool, every_item, self.device.memory_bytes, stage, obstacle)


def _shares_weights(config: DovetailConfig, layouts: dict[str, RoleLayout]) -> bool:
    """The embedded engine beside one process, where both compute in the same dtype and no adapters are merged."""
    policy, actor = config.actor_rollout_ref, layouts["actor"]
    return (
        policy.rollout.name == "native"
        and not actor.is_megatron
        and actor.world_size == 1
        and layouts["rollout"].pool == actor.pool
        and not policy.model.uses_lora
        and full_dtype(policy.rollout.dtype) == full_dtype(policy.actor.fsdp_config.mixed_precision.param_dtype)
    )


def _verdict(phases: list[PhaseMemory], device: Device) -> str:
    peak = max(phases, key=lambda phase: phase.total)
    have = device.memory_bytes / GIB
    tight = [phase.name for phase in phases if not phase.fits]
    if tight:
        return f"does not fit in {have:.1f} GiB: {', '.join(tight)}"
    return f"fits: {peak.name} is the fullest phase with {peak.total / GIB:.1f} of {have:.1f} GiB"
