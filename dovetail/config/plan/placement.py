"""Who runs where: each role's devices and parallel sizes, read from the config.

Sizes that do not divide are cut down, never refused: `dovetail.config.checks` says what is wrong with them.
"""

from __future__ import annotations

from dovetail.config.actor import ActorConfig
from dovetail.config.critic import CriticConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.ref import RefConfig
from dovetail.config.reward import RewardModelConfig
from dovetail.config.root import DovetailConfig

SHARED_POOL = "global"


def make_layouts(config: DovetailConfig) -> dict[str, RoleLayout]:
    """The layout of every role that the run has, by role."""
    policy = config.actor_rollout_ref
    world = config.trainer.world_size
    layouts = {"actor": training_layout("actor", policy.actor, policy.actor.fsdp_config, world)}
    layouts["rollout"] = rollout_layout(config)
    if config.uses_reference:
        layouts["ref"] = training_layout("ref", policy.ref, policy.ref.fsdp_config, world)
    if config.uses_critic:
        layouts["critic"] = training_layout("critic", config.critic, config.critic.fsdp_config, world)
    if config.reward_model.enable:
        layouts["reward_model"] = _reward_layout(config)
    return layouts


def training_layout(
    role: str,
    section: ActorConfig | RefConfig | CriticConfig | RewardModelConfig,
    fsdp: FSDPConfig,
    world: int,
    pool: str = SHARED_POOL,
) -> RoleLayout:
    """Layout of a role that runs on a training backend."""
    if section.strategy == "megatron":
        return _megatron_layout(role, section.megatron, world, pool)
    # A sharding over one process is no sharding: the plain backend does the same.
    if section.strategy == "single" or (world == 1 and not fsdp.offload_policy):
        return RoleLayout(role, "single", pool, world_size=1, data_parallel=1)
    sequence = section.ulysses_sequence_parallel_size
    shard = fsdp.fsdp_size if 0 < fsdp.fsdp_size < world else world
    return RoleLayout(
        role=role,
        backend=section.strategy,
        pool=pool,
        world_size=world,
        data_parallel=max(1, world // sequence),
        sequence_parallel=sequence,
        shard_size=shard,
        replicas=max(1, world // shard),
    )


def rollout_layout(config: DovetailConfig) -> RoleLayout:
    """Layout of the generation engines: on the trainer's devices, or on their own."""
    rollout = config.actor_rollout_ref.rollout
    own = rollout.own_devices
    shares = own == 0
    world = config.trainer.world_size if shares else own
    engines = max(1, world // rollout.engine_world_size)
    return RoleLayout(
        role="rollout",
        backend=rollout.name,
        pool=SHARED_POOL if shares else "rollout",
        world_size=world,
        data_parallel=engines * rollout.data_parallel_size,
        tensor_parallel=rollout.tensor_model_parallel_size,
        pipeline_parallel=rollout.pipeline_model_parallel_size,
        expert_parallel=rollout.expert_parallel_size,
        num_engines=engines,
    )


def _reward_layout(config: DovetailConfig) -> RoleLayout:
    reward = config.reward_model
    own = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else 0
    world, pool = (own, "reward_model") if own else (config.trainer.world_size, SHARED_POOL)
    return training_layout("reward_model", reward, reward.model.fsdp_config, world, pool)


def _megatron_layout(role: str, megatron: MegatronConfig, world: int, pool: str) -> RoleLayout:
    extra = megatron.override_transformer_config
    return RoleLayout(
        role=role,
        backend="megatron",
        pool=pool,
        world_size=world,
        data_parallel=max(1, world // megatron.model_parallel_size),
        tensor_parallel=megatron.tensor_model_parallel_size,
        pipeline_parallel=megatron.pipeline_model_parallel_size,
        context_parallel=megatron.context_parallel_size,
        expert_parallel=megatron.expert_model_parallel_size,
        expert_tensor_parallel=megatron.expert_tensor_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=_layers(extra.get("num_layers_in_first_pipeline_stage")),
        last_stage_layers=_layers(extra.get("num_layers_in_last_pipeline_stage")),
        embedding_counts=bool(extra.get("account_for_embedding_in_pipeline_split")),
        head_counts=bool(extra.get("account_for_loss_in_pipeline_split")),
    )


def _layers(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
