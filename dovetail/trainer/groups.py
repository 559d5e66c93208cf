"""The roles of a run and the worker groups that run them, on Ray or in this process.

Roles that share devices share processes: one process per device holds the actor, its engine, the reference, the critic
and the reward model, so weights are never held twice on a device. With `hybrid_engine=False` the engines, and with
`distill.teacher.nnodes` the teacher, are processes on a pool of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass

from dovetail.checkpoint.sharded import BACKGROUND_LIMIT_S
from dovetail.config.root import DovetailConfig
from dovetail.controller import (
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerGroup,
    create_colocated_worker_cls,
)
from dovetail.controller.hangs import CallLimits
from dovetail.trainer.engines import GENERATION, SeparateEngines
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.critic_worker import CriticWorker
from dovetail.workers.reward_model_worker import RewardModelWorker
from dovetail.workers.rollout_worker import RolloutWorker

POLICY, CRITIC, REWARD = "actor_rollout_ref", "critic", "reward_model"


@dataclass(frozen=True)
class TrainedGroups(ABC):
    """What the loop of every method needs to know of its groups; `processes` are the processes behind them."""

    processes: WorkerGroup

    @property
    @abstractmethod
    def trained(self) -> dict[str, WorkerGroup]:
        """The groups whose models are trained, by their folder in a checkpoint. The first one is the `learner`."""

    @property
    def learner(self) -> WorkerGroup:
        return next(iter(self.trained.values()))

    def freeze_gc(self) -> None:
        """Exclude what the processes have built from later garbage collections."""
        self.processes.freeze_gc()

    def shutdown(self) -> None:
        """End the processes and give their devices back: another run may follow on the same Ray."""
        self.processes.release()


@dataclass(frozen=True)
class RoleGroups(TrainedGroups):
    """The groups of an RL run."""

    actor_rollout: WorkerGroup
    ref: WorkerGroup | None
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    engines: SeparateEngines | None = None
    """Engines on devices of their own; None when the actor's processes generate."""

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return {"actor": self.actor_rollout} | ({} if self.critic is None else {"critic": self.critic})

    def init_policy(self, total_steps: int) -> None:
        """The actor, its reference and its engines."""
        if self.teacher is not None:
            self.teacher.init_model()
        self.actor_rollout.init_model(total_steps)
        if self.engines is not None:
            self.engines.init_model()

    @property
    def teacher(self) -> WorkerGroup | None:
        """A teacher on devices of its own."""
        return None if self.ref is self.actor_rollout else self.ref

    @property
    def rollout(self) -> WorkerGroup | SeparateEngines:
        """The group, or the engines, to call `generate_sequences` on."""
        return self.actor_rollout if self.engines is None else self.engines

    @property
    def num_engines(self) -> int:
        """Engines that prompts are divided over."""
        group = self.actor_rollout if self.engines is None else self.engines.group
        return group.dp_size("rollout")

    def weights_changed(self, version: int) -> None:
        """Call after an update or a load; `version` is the global step that left the weights.

        Processes that both train and generate keep track themselves, and get the version with the prompts.
        """
        if self.engines is not None:
            self.engines.weights_changed(version)

    def freeze_gc(self) -> None:
        super().freeze_gc()
        if self.teacher is not None:
            self.teacher.freeze_gc()
        if self.engines is not None:
            self.engines.freeze_gc()

    def close_agents(self) -> None:
        """The run is over: what the agents' tools hold is given back before the processes end."""
        (self.actor_rollout if self.engines is None else self.engines.group).close_agents()

    def shutdown(self) -> None:
        with ExitStack() as ends:  # each of them, also when a second Ctrl-C interrupts another
            ends.callback(super().shutdown)
            if self.teacher is not None:
                ends.callback(self.teacher.release)
            if self.engines is not None:
                ends.callback(self.engines.shutdown)


def role_classes(config: DovetailConfig, *, generates: bool = True) -> dict[str, RayClassWithInitArgs]:
    """The worker class of every role in the trainer's processes."""
    policy = "actor_rollout" if config.actor_rollout_ref.hybrid_engine and generates else "actor"
    policy += "" if config.teacher_devices else "_ref"
    roles = {POLICY: RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role=policy)}
    if config.uses_critic:
        roles[CRITIC] = RayClassWithInitArgs(CriticWorker, config=config)
    if config.reward_model.enable:
        roles[REWARD] = RayClassWithInitArgs(RewardModelWorker, config=config)
    return roles


def create_groups(config: DovetailConfig, *, use_ray: bool, use_gpu: bool, generates: bool = True) -> RoleGroups:
    """Start the processes. Without Ray there is one, this one. `generates=False`: no engine anywhere."""
    apart = generates and not config.actor_rollout_ref.hybrid_engine
    for key, is_apart, who in (
        ("actor_rollout_ref.hybrid_engine=False", apart, "engines"),
        (f"distill.teacher.nnodes={config.distill.teacher.nnodes}", config.teacher_devices > 0, "the teacher"),
    ):
        if not use_ray and is_apart:
            why = f"{key} puts {who} into processes of their own, which needs Ray; drop --local, or leave the key out."
            raise ValueError(why)
    with ExitStack() as started:  # what has started ends where a later group does not start
        processes, groups = start_processes(
            config, role_classes(config, generates=generates), use_ray=use_ray, use_gpu=use_gpu
        )
        started.callback(processes.release)
        policy = groups[POLICY]
        ref = policy if config.uses_reference else None
        if config.teacher_devices:
            ref = _teacher(config, use_gpu)
            started.callback(ref.release)
        engines = _separate_engines(config, policy, use_gpu) if apart else None
        started.pop_all()
    return RoleGroups(processes, policy, ref, groups.get(CRITIC), groups.get(REWARD), engines)


def start_processes(
    config: DovetailConfig, roles: dict[str, RayClassWithInitArgs], *, use_ray: bool, use_gpu: bool
) -> tuple[WorkerGroup, dict[str, WorkerGroup]]:
    """The processes of the trainer, one for each device, and the group of each role in them."""
    together = create_colocated_worker_cls(roles)
    if use_ray:
        pool = RayResourcePool(
            [config.trainer.n_gpus_per_node] * config.trainer.nnodes, use_gpu=use_gpu, name_prefix="dovetail"
        )
        processes: WorkerGroup = _start_on(pool, together, config)
    elif config.trainer.world_size == 1:
        processes = LocalWorkerGroup(together, limits=call_limits(config))
    else:
        raise ValueError(
            f"trainer.n_gpus_per_node x trainer.nnodes = {config.trainer.world_size} processes need Ray; "
            "drop --local, or set both to 1."
        )
    groups: dict[str, WorkerGroup] = dict(processes.spawn(roles))
    return processes, groups


def _teacher(config: DovetailConfig, use_gpu: bool) -> WorkerGroup:
    teacher = config.distill.teacher
    pool = RayResourcePool([teacher.n_gpus_per_node] * teacher.nnodes, use_gpu=use_gpu, name_prefix="dovetail-teacher")
    worker = RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role="ref")
    return _start_on(pool, worker, config, "teacher")


def _separate_engines(config: DovetailConfig, trainer: WorkerGroup, use_gpu: bool) -> SeparateEngines:
    rollout = config.actor_rollout_ref.rollout
    pool = RayResourcePool([rollout.n_gpus_per_node] * rollout.nnodes, use_gpu=use_gpu, name_prefix="dovetail-engines")

    def start() -> WorkerGroup:
        return _start_on(pool, RayClassWithInitArgs(RolloutWorker, config=config), config, GENERATION)

    return SeparateEngines(config, trainer, start)


def _start_on(
    pool: RayResourcePool, worker: RayClassWithInitArgs, config: DovetailConfig, name: str | None = None
) -> RayWorkerGroup:
    """A group on a pool of its own. The pool is given back if the group does not start."""
    try:
        return RayWorkerGroup(pool, worker, name_prefix=name, limits=call_limits(config))
    except BaseException:
        pool.release()
        raise


def call_limits(config: DovetailConfig) -> CallLimits:
    """How long calls of the workers may take, in other processes or in this one."""
    rollout = config.actor_rollout_ref.rollout
    generating = ("generate_sequences", "generate_groups") if rollout.uses_agents else ()
    allowed = dict.fromkeys(generating, rollout.multi_turn.trajectory_timeout_s)
    # Earlier calls, when all was written, do not say how long a save may take. The writer has a limit of its own.
    allowed["finish_saving"] = BACKGROUND_LIMIT_S
    return CallLimits(config.trainer.worker_timeout_s, allowed_s=allowed)
