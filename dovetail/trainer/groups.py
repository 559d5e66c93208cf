"""Which roles a run has, and the groups of processes that play them: on Ray, or in this process.

Roles that share devices share processes: one process per device holds the actor, its engine, the reference, the critic
and the reward model, so weights never compete with a second copy of themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.root import DovetailConfig
from dovetail.controller import (
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerGroup,
    create_colocated_worker_cls,
)
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.critic_worker import CriticWorker
from dovetail.workers.reward_model_worker import RewardModelWorker

POLICY, CRITIC, REWARD = "actor_rollout_ref", "critic", "reward_model"


@dataclass(frozen=True)
class RoleGroups:
    """The groups of a run; `all` are the processes behind them."""

    actor_rollout: WorkerGroup
    ref: WorkerGroup | None
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    processes: WorkerGroup

    def shutdown(self) -> None:
        self.processes.shutdown()


def role_classes(config: DovetailConfig) -> dict[str, RayClassWithInitArgs]:
    """The worker class of every role the config asks for."""
    roles = {POLICY: RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role=POLICY)}
    if config.uses_critic:
        roles[CRITIC] = RayClassWithInitArgs(CriticWorker, config=config)
    if config.reward_model.enable:
        roles[REWARD] = RayClassWithInitArgs(RewardModelWorker, config=config)
    return roles


def create_groups(config: DovetailConfig, *, use_ray: bool, use_gpu: bool) -> RoleGroups:
    """Start the processes. Without Ray there is one, this one."""
    roles = role_classes(config)
    together = create_colocated_worker_cls(roles)
    if use_ray:
        pool = RayResourcePool(
            [config.trainer.n_gpus_per_node] * config.trainer.nnodes, use_gpu=use_gpu, name_prefix="dovetail"
        )
        processes: WorkerGroup = RayWorkerGroup(pool, together)
    elif config.trainer.world_size == 1:
        processes = LocalWorkerGroup(together)
    else:
        raise ValueError(
            f"trainer.n_gpus_per_node x trainer.nnodes = {config.trainer.world_size} processes need Ray; "
            "drop --local, or set both to 1."
        )
    groups = processes.spawn(roles)
    policy = groups[POLICY]
    return RoleGroups(
        actor_rollout=policy,
        ref=policy if config.uses_reference else None,
        critic=groups.get(CRITIC),
        reward_model=groups.get(REWARD),
        processes=processes,
    )
