"""From a config and model shapes to the memory plan: which phases a step has and who waits in each."""

from __future__ import annotations

from dovetail.config.fsdp import full_dtype
from dovetail.config.plan.advice import advise
from dovetail.config.plan.batches import BatchPlan
from dovetail.config.plan.devices import GIB, Device
from dovetail.config.plan.engine_memory import EngineMemory, engine_memory
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.memory import (
    MemoryPlan,
    PhaseMemory,
    StageMemory,
    rollout_phase,
    stage_memory,
    sync_phase,
    training_phase,
    training_stages,
)
from dovetail.config.plan.model_shape import Shapes
from dovetail.config.plan.role_memory import RoleMemory, TrainingSection, role_memory, with_value_head
from dovetail.config.root import DovetailConfig

MIB = 1024**2
# What a sleeping engine keeps: its process, graphs and buffers that are not tagged as weights or cache.
SLEEPING_ENGINE = 1.0 * GIB


def make_memory(
    config: DovetailConfig, layouts: dict[str, RoleLayout], batches: BatchPlan, shapes: Shapes, device: Device
) -> MemoryPlan | None:
    """Memory of every phase; None when the policy's shape is not known."""
    if shapes.policy is None:
        return None
    roles = _roles(config, layouts, shapes, device)
    rollout, layout = config.actor_rollout_ref.rollout, layouts["rollout"]
    per_replica = batches.sequences_per_engine / rollout.data_parallel_size
    engine = engine_memory(
        shapes.policy,
        layout,
        rollout,
        device=device,
        sequences_per_replica=per_replica,
        shares_weights=_shares_weights(config, layouts),
    )
    phases = _phases(config, layouts, batches, roles, engine, device)
    stages = _stages(config, layouts, batches, roles, engine, device)
    advice = tuple(_advice(config, layouts, batches, phases))
    return MemoryPlan(
        device=device.name,
        device_bytes=device.memory_bytes,
        phases=tuple(phases),
        host_bytes_per_node=sum(role.on_host() for role in roles.values()) * config.trainer.n_gpus_per_node,
        cached_tokens=engine.cached_tokens,
        full_sequences=engine.full_sequences,
        verdict=_verdict(phases, device),
        advice=advice,
        stages=tuple(stages),
    )


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


def _roles(
    config: DovetailConfig, layouts: dict[str, RoleLayout], shapes: Shapes, device: Device
) -> dict[str, RoleMemory]:
    policy = config.actor_rollout_ref
    assert shapes.policy is not None, "the memory plan needs the policy's shape"
    checkpointing, fused = policy.model.enable_gradient_checkpointing, policy.model.use_fused_kernels
    roles = {
        "actor": role_memory(
            policy.actor,
            layouts["actor"],
            shapes.policy,
            fsdp=policy.actor.fsdp_config,
            optim=policy.actor.optim,
            checkpointing=_recomputes(policy.actor, checkpointing),
            fused_head=fused,
            activation_offload=policy.model.enable_activation_offload,
            needs_entropy=policy.actor.needs_entropy,
            compiled=policy.actor.use_torch_compile and device.is_accelerator,
            lora_rank=policy.model.lora_rank,
        )
    }
    # With LoRA the reference is the actor with its adapters switched off: no second copy.
    if "ref" in layouts and not policy.model.uses_lora:
        roles["ref"] = role_memory(
            policy.ref,
            layouts["ref"],
            shapes.policy,
            fsdp=policy.ref.fsdp_config,
            optim=None,
            checkpointing=False,
            fused_head=fused,
        )
    if "critic" in layouts and shapes.critic is not None:
        roles["critic"] = role_memory(
            config.critic,
            layouts["critic"],
            with_value_head(shapes.critic),
            fsdp=config.critic.fsdp_config,
            optim=config.critic.optim,
            checkpointing=_recomputes(config.critic, config.critic.model.enable_gradient_checkpointing),
            fused_head=False,
            activation_offload=config.critic.model.enable_activation_offload,
            lora_rank=config.critic.model.lora_rank,
        )
    if "reward_model" in layouts and shapes.reward is not None:
        roles["reward_model"] = role_memory(
            config.reward_model,
            layouts["reward_model"],
            with_value_head(shapes.reward),
            fsdp=config.reward_model.model.fsdp_config,
            optim=None,
            checkpointing=False,
            fused_head=False,
        )
    return roles


def _phases(
    config: DovetailConfig,
    layouts: dict[str, RoleLayout],
    batches: BatchPlan,
    roles: dict[str, RoleMemory],
    engine: EngineMemory,
    device: Device,
) -> list[PhaseMemory]:
    rollout = config.actor_rollout_ref.rollout
    pool = layouts["rollout"].pool
    shared = pool == layouts["actor"].pool
    neighbours = {name: role for name, role in roles.items() if role.layout.pool == pool}
    phases = [rollout_phase(engine, neighbours, pool, device)]
    left = _left_by_engine(config, engine, device)
    for batch in batches.passes:
        role = batch.role if batch.role in roles else "actor" if batch.role == "ref" else None
        if role is None:
            continue
        mates = {name: mate for name, mate in roles.items() if mate.layout.pool == roles[role].layout.pool}
        rest = left if roles[role].layout.pool == pool else 0.0
        phases.append(training_phase(batch.name, role, mates, batch, rest, device))
    trainers = {name: role for name, role in roles.items() if role.layout.pool == layouts["actor"].pool}
    bucket = rollout.update_weights_bucket_megabytes * MIB
    phases.append(sync_phase(engine, trainers, bucket, device, shared=shared))
    return phases


def _stages(
    config: DovetailConfig,
    layouts: dict[str, RoleLayout],
    batches: BatchPlan,
    roles: dict[str, RoleMemory],
    engine: EngineMemory,
    device: Device,
) -> list[StageMemory]:
    stages: list[StageMemory] = []
    for batch in batches.passes:
        active = roles.get(batch.role)
        if active is None or not batch.trains or not active.layout.is_megatron:
            continue
        mates = {name: mate for name, mate in roles.items() if mate.layout.pool == active.layout.pool}
        shares = active.layout.pool == layouts["rollout"].pool
        rest = _left_by_engine(config, engine, device) if shares else 0.0
        stages.extend(stage_memory(active, training_stages(batch.name, batch.role, mates, batch, rest, device)))
    return stages


def _left_by_engine(config: DovetailConfig, engine: EngineMemory, device: Device) -> float:
    """Bytes of the engine on a device while a role computes."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.free_cache_engine is False:
        return engine.weights + engine.workspace + engine.cache
    return SLEEPING_ENGINE if device.is_accelerator and rollout.name != "native" else 0.0


def _recomputes(section: TrainingSection, default: bool) -> bool:
    """Whether layers are computed again in backward; Megatron's own option goes before the model's."""
    if section.strategy != "megatron":
        return default
    return (
        section.megatron.override_transformer_config.get("recompute_granularity", "full" if default else "") == "full"
    )


def _advice(
    config: DovetailConfig, layouts: dict[str, RoleLayout], batches: BatchPlan, phases: list[PhaseMemory]
) -> list[str]:
    passes = {batch.name: batch for batch in batches.passes}
    advice = []
    for phase in phases:
        if phase.fits:
            continue
        batch = passes.get(phase.name)
        ranks = layouts[batch.role].ranks_per_sequence if batch else 1
        advice.append(advise(config, phase, batch, batches.max_sequence_length / ranks))
    return advice


def _verdict(phases: list[PhaseMemory], device: Device) -> str:
    peak = max(phases, key=lambda phase: phase.total)
    have = device.memory_bytes / GIB
    if all(phase.fits for phase in phases):
        return f"fits: {peak.name} is the fullest phase with {peak.total / GIB:.1f} of {have:.1f} GiB"
    tight = [phase.name for phase in phases if not phase.fits]
    return f"does not fit in {have:.1f} GiB: {', '.join(tight)}"
