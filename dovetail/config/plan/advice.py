"""What to change when a phase does not fit: one sentence with keys and numbers per phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.config.plan.batches import PASSES, PassBatches
from dovetail.config.root import DovetailConfig
from dovetail.config.units import GIB

if TYPE_CHECKING:
    from dovetail.config.plan.memory import PhaseMemory

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_KEYS = {"update actor": _ACTOR, "update critic": "critic"}


def advise(config: DovetailConfig, phase: PhaseMemory, batch: PassBatches | None, longest: float) -> str:
    """Why `phase` does not fit and what to try; `longest` is the longest sequence's share on one device, in tokens."""
    have, need = phase.device_bytes / GIB, phase.total / GIB
    largest = phase.largest
    if phase.obstacle:
        reason = f"{phase.name} does not fit: {phase.obstacle}"
    else:
        share = phase.items[largest] / GIB
        reason = f"{phase.name} needs {need:.1f} of {have:.1f} GiB, {share:.1f} of them for {largest}"
    return f"{reason}; try {_remedy(config, phase, largest, batch, longest)}."


def _remedy(config: DovetailConfig, phase: PhaseMemory, largest: str, batch: PassBatches | None, longest: float) -> str:
    if phase.name in ("rollout", "weight sync"):
        return _engine_remedy(config, phase, largest)
    if largest in ("activations", "logits") and batch is not None:
        return _batch_remedy(config, phase, largest, batch, longest)
    if largest == "waiting roles":
        return "param_offload and optimizer_offload of the other roles"
    if largest == "engine":
        return f"{_ROLLOUT}.free_cache_engine=True"
    return _state_remedy(config, phase)


def _engine_remedy(config: DovetailConfig, phase: PhaseMemory, largest: str) -> str:
    rollout = config.actor_rollout_ref.rollout
    if largest in ("waiting roles", "optimizer", "weights") and not phase.obstacle:
        return _offload(config)
    doubled = f"{_ROLLOUT}.tensor_model_parallel_size={2 * rollout.tensor_model_parallel_size}"
    if phase.obstacle:
        more = min(0.9, rollout.gpu_memory_utilization + 0.2)
        return f"{doubled} or {_ROLLOUT}.gpu_memory_utilization={more:.2f}"
    spare = (phase.device_bytes - phase.items["waiting roles"] - phase.items["runtime"]) / phase.device_bytes
    if spare > 0.1:
        return f"{_ROLLOUT}.gpu_memory_utilization={int(spare * 20) / 20:.2f} or less"
    return f"{doubled}, or {_offload(config)}"


def _batch_remedy(config: DovetailConfig, phase: PhaseMemory, largest: str, batch: PassBatches, longest: float) -> str:
    if largest == "logits" and not config.actor_rollout_ref.model.use_fused_kernels and batch.role != "critic":
        return "actor_rollout_ref.model.use_fused_kernels=True, which never holds the logits"
    model = config.critic.model if batch.role == "critic" else config.actor_rollout_ref.model
    if batch.trains and largest == "activations" and not model.enable_gradient_checkpointing:
        where = "critic.model" if batch.role == "critic" else "actor_rollout_ref.model"
        return f"{where}.enable_gradient_checkpointing=True"
    flexible = phase.items["activations"] + phase.items["logits"]
    room = phase.device_bytes - (phase.total - flexible)
    keys = PASSES[phase.name]
    tokens = int(batch.tokens_per_device * max(0.0, room) / flexible)
    if batch.token_budget is not None and tokens >= longest:
        return f"{keys.section}.{keys.tokens}={tokens // 256 * 256 or tokens}"
    if batch.micro_batch is not None and batch.micro_batch > 1 and tokens >= longest:
        return f"{keys.section}.{keys.sequences}={max(1, int(tokens / longest))}"
    if config.actor_rollout_ref.actor.strategy == "megatron":
        return f"a larger {_ACTOR}.megatron.context_parallel_size or tensor_model_parallel_size"
    sequence = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    return f"ulysses_sequence_parallel_size={2 * sequence}: one longest sequence is already too much for a device"


def _state_remedy(config: DovetailConfig, phase: PhaseMemory) -> str:
    prefix = _KEYS.get(phase.name, _ACTOR)
    section = config.critic if prefix == "critic" else config.actor_rollout_ref.actor
    if section.strategy == "megatron":
        return f"a larger {prefix}.megatron.pipeline_model_parallel_size or tensor_model_parallel_size, or more nodes"
    if 0 < section.fsdp_config.fsdp_size < config.trainer.world_size:
        return f"{prefix}.fsdp_config.fsdp_size=-1, which cuts the states over all {config.trainer.world_size} devices"
    if section.strategy == "fsdp2" and not section.fsdp_config.offload_policy:
        return f"{prefix}.fsdp_config.offload_policy=True (slower), or more devices"
    return "more devices (trainer.nnodes), or a smaller model"


def _offload(config: DovetailConfig) -> str:
    section = "megatron" if config.actor_rollout_ref.actor.strategy == "megatron" else "fsdp_config"
    return f"{_ACTOR}.{section}.param_offload=True and {_ACTOR}.{section}.optimizer_offload=True"
