"""Who is trained on preferences: a policy, or a reward model. Knows no data format."""

from __future__ import annotations

from dovetail.algorithms.offline.registry import OfflineLoss, preference_loss, reward_model_loss
from dovetail.backends.base import TrainBackend
from dovetail.config.root import DovetailConfig
from dovetail.workers.build import build_critic
from dovetail.workers.offline import OfflineWorker


def policy_loss(config: DovetailConfig) -> OfflineLoss:
    """The loss that the section `dpo` describes."""
    settings = config.dpo.model_dump()
    return preference_loss(settings.pop("loss_type"), **settings)


class PreferenceWorker(OfflineWorker):
    """A policy that learns which of two responses is preferred."""

    def _build_loss(self) -> OfflineLoss:
        return policy_loss(self.config)


class RewardTrainingWorker(OfflineWorker):
    """A network that learns to score the preferred response higher, as the section `critic` says."""

    _trains = "critic"

    def _build_backend(self, total_training_steps: int) -> TrainBackend:
        return build_critic(
            self.config.critic, total_training_steps, world_size=self.world_size, role="reward", device=self.device
        )

    def _build_loss(self) -> OfflineLoss:
        return reward_model_loss(center_coefficient=self.config.reward_training.center_coefficient)
