"""Who runs where: each role's devices and parallel sizes, and how much memory a device has, read from the config.

Sizes that do not divide are cut down, never refused: `dovetail.config.checks` says what is wrong with them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from dovetail.config.actor import RoleConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.plan.stages import pipeline_stages
from dovetail.config.reward import RewardModelConfig
from dovetail.config.root import DovetailConfig
from dovetail.config.units import GIB

TrainingSection = RoleConfig | RewardModelConfig

SHARED_POOL = "global"
# What is planned for when nobody says: the common data-centre card, and the card of the npu recipes.
DEFAULT_GIB = {"cuda": 80.0, "auto": 80.0, "npu": 64.0}
# Driver context, collectives and allocator before the first tensor.
ACCELERATOR_RUNTIME = 1.5 * GIB
# Interpreter and libraries of one CPU worker.
CPU_RUNTIME = 0.6 * GIB


@dataclass(frozen=True)
class RoleLayout:
    """Where a role runs and how its model is split there."""

    role: str
    backend: str
    pool: str
    world_size: int
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    # Ulysses: ranks that share one sequence, outside Megatron.
    sequence_parallel: int = 1
    # FSDP: ranks over which one copy of the weights is cut, and copies.
    shard_size: int = 1
    replicas: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    # Megatron's account_for_*_in_pipeline_split: embedding and head take the place of a layer.
    embedding_counts: bool = False
    head_counts: bool = False
    # Rollout only: independent engines.
    num_engines: int | None = None

    @property
    def is_megatron(self) -> bool:
        return self.backend == "megatron"

    @property
    def expert_data_parallel(self) -> int:
        """Copies of each expert: what distributed optimizers can spread its states over."""
        per_copy = self.pipeline_parallel * self.expert_parallel * self.expert_tensor_parallel
        return max(1, self.world_size // per_copy)

    @property
    def ranks_per_sequence(self) -> int:
        return self.sequence_parallel * self.context_parallel

    @property
    def divides(self) -> bool:
        """Whether the parallel sizes of a training role divide its world; other checks rely on it."""
        return self.world_size % (self.tensor_parallel * self.pipeline_parallel * self.ranks_per_sequence) == 0

    def stages(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Layers of each pipeline stage."""
        return pipeline_stages(
            num_layers,
            self.pipeline_parallel,
            virtual=self.virtual_pipeline,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
            count_embedding=self.embedding_counts,
            count_head=self.head_counts,
        )


def make_layouts(config: DovetailConfig) -> dict[str, RoleLayout]:
    """The layout of every role that the run has, by role."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    world = config.trainer.world_size
    if config.trainer.method == "reward":
        return {"critic": _training_layout("critic", critic, world)}
    layouts = {"actor": _training_layout("actor", policy.actor, world), "rollout": _rollout_layout(config)}
    if not config.generates:
        return {"actor": layouts["actor"]}
    if config.uses_reference:
        own = config.teacher_devices
        pool = "teacher" if own else SHARED_POOL
        layouts["ref"] = _training_layout("ref", policy.ref, own or world, pool)
    if config.uses_critic:
        layouts["critic"] = _training_layout("critic", critic, world)
    if reward.enable:
        own = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else 0
        pool = "reward_model" if own else SHARED_POOL
        layouts["reward_model"] = _training_layout("reward_model", reward, own or world, pool)
    return layouts


def _training_layout(role: str, section: TrainingSection, world: int, pool: str = SHARED_POOL) -> RoleLayout:
    """Layout of a role that runs on a training backend."""
    fsdp = section.fsdp_config
    if section.strategy == "megatron":
        return _megatron_layout(role, section.megatron, world, pool)
    # A sharding over one process is no sharding: the plain backend does the same.
    if section.strategy == "single" or (world == 1 and not fsdp.offload_policy):
        return RoleLayout(role, "single", pool, world_size=1, data_parallel=1)
    sequence = section.ulysses_sequence_parallel_size
    shard = fsdp.fsdp_size if 0 < fsdp.fsdp_size < world else world
    return RoleLayout(
        role,
        section.strategy,
        pool,
        world,
        data_parallel=max(1, world // sequence),
        sequence_parallel=sequence,
        shard_size=shard,
        replicas=max(1, world // shard),
    )


def _rollout_layout(config: DovetailConfig) -> RoleLayout:
    """Layout of the generation engines: on the trainer's devices, or on their own."""
    rollout = config.actor_rollout_ref.rollout
    world = rollout.own_devices or config.trainer.world_size
    engines = max(1, world // rollout.engine_world_size)
    return RoleLayout(
        "rollout",
        rollout.name,
        "rollout" if rollout.own_devices else SHARED_POOL,
        world,
        data_parallel=engines * rollout.data_parallel_size,
        tensor_parallel=rollout.tensor_model_parallel_size,
        pipeline_parallel=rollout.pipeline_model_parallel_size,
        expert_parallel=rollout.expert_parallel_size,
        num_engines=engines,
    )


def _megatron_layout(role: str, megatron: MegatronConfig, world: int, pool: str) -> RoleLayout:
    extra = megatron.override_transformer_config
    ends = [extra.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    first, last = (value if isinstance(value, int) and not isinstance(value, bool) else None for value in ends)
    return RoleLayout(
        role,
        "megatron",
        pool,
        world,
        data_parallel=max(1, world // megatron.model_parallel_size),
        tensor_parallel=megatron.tensor_model_parallel_size,
        pipeline_parallel=megatron.pipeline_model_parallel_size,
        context_parallel=megatron.context_parallel_size,
        expert_parallel=megatron.expert_model_parallel_size,
        expert_tensor_parallel=megatron.expert_tensor_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=first,
        last_stage_layers=last,
        embedding_counts=bool(extra.get("account_for_embedding_in_pipeline_split")),
        head_counts=bool(extra.get("account_for_loss_in_pipeline_split")),
    )


@dataclass(frozen=True)
class Device:
    """One device (or one CPU worker) and what its runtime takes."""

    name: str
    memory_bytes: float
    runtime_bytes: float
    is_accelerator: bool


def plan_device(config: DovetailConfig, memory_gib: float | None = None) -> Device:
    """The device that the plan is made for; `memory_gib` overrides the table.

    Never asks a driver: a plan is made on a laptop for a cluster.
    """
    kind = config.trainer.device
    if kind == "cpu":
        host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        memory = memory_gib * GIB if memory_gib else host / config.trainer.n_gpus_per_node
        return Device("CPU worker", memory, CPU_RUNTIME, is_accelerator=False)
    memory = (memory_gib or DEFAULT_GIB[kind]) * GIB
    return Device("NPU" if kind == "npu" else "GPU", memory, ACCELERATOR_RUNTIME, is_accelerator=True)
