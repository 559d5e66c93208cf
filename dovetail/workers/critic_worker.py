"""`CriticWorker`: the value network in one process."""

from __future__ import annotations

from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, register
from dovetail.protocol import DataProto
from dovetail.workers.build import build_critic
from dovetail.workers.critic import DataParallelPPOCritic
from dovetail.workers.training_role import CheckpointedRole, loaded


class CriticWorker(CheckpointedRole):
    """Values of responses and updates of the network that predicts them."""

    _trains = "critic"

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__(config)
        self._critic: DataParallelPPOCritic | None = None

    @property
    def critic(self) -> DataParallelPPOCritic:
        if self._critic is None:
            raise RuntimeError("init_model has not been called on the critic.")
        return self._critic

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int = -1) -> None:
        """Build network, optimizer and schedule."""
        config = self.config.critic
        self.join_group(config.nccl_timeout)
        backend = build_critic(config, total_training_steps, world_size=self.world_size, device=self.device)
        rows = config.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // backend.rank_info.dp_size
        self._critic = DataParallelPPOCritic(
            config,
            backend,
            mini_batch_rows=max(1, rows),
            loss_scale_factor=self.config.loss_scale_factor,
            seed=self.config.trainer.seed,
        )
        self.register_in_mesh("critic", backend)
        backend.offload(params=config.offloading.param_offload, optimizer=config.offloading.optimizer_offload)

    @register(dispatch_mode=Dispatch.mesh("critic", pad=True))
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` before each response token."""
        with loaded(self.critic.backend, self.config.critic.offloading):
            return DataProto.from_dict({"values": self.critic.compute_values(data)})

    @register(dispatch_mode=Dispatch.mesh("critic"))
    def update_critic(self, data: DataProto) -> DataProto:
        """One update; metrics in `meta_info["metrics"]`, equal on every rank."""
        with loaded(self.critic.backend, self.config.critic.offloading, trains=True):
            metrics = self.critic.update_critic(data) | self.critic.backend.memory()
        return DataProto(meta_info={"metrics": metrics})

    @property
    def _trained(self) -> DataParallelPPOCritic:
        return self.critic
