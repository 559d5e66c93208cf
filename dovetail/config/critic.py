"""`critic.*`: the value network of PPO. Batch sizes are the actor's unless set."""

from __future__ import annotations

from dovetail.config.actor import ActorConfig, CheckpointConfig, LossAggMode, RoleConfig, Strategy
from dovetail.config.base import all_of, inherits, key, read_with, section, unused, when_is
from dovetail.config.model import CriticModelConfig
from dovetail.config.optim import CriticOptimConfig

_ACTOR = "actor_rollout_ref.actor"
_NO_CRITIC, _no_critic = "no critic is trained with this algorithm.adv_estimator", when_is("uses_critic", False)
# A reward network takes these from the critic's section where it has none of its own.
_FOR_REWARDS_TOO = "use_dynamic_bsz forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu"


class CriticConfig(RoleConfig):
    """Value network and its update."""

    rules = (
        read_with(".use_dynamic_bsz", True, only="min_num_micro_batch"),
        unused(_NO_CRITIC, _no_critic, but=f"enable {_FOR_REWARDS_TOO}"),
        unused(_NO_CRITIC, all_of(_no_critic, when_is("reward_model.enable", False)), only=_FOR_REWARDS_TOO),
    )

    enable: bool | None = key(None, "Train a critic. Null: when the advantage estimator needs values.")
    strategy: Strategy = inherits(f"{_ACTOR}.strategy", ActorConfig)
    model: CriticModelConfig = section(CriticModelConfig)
    optim: CriticOptimConfig = section(CriticOptimConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    ppo_mini_batch_size: int = inherits(f"{_ACTOR}.ppo_mini_batch_size", ActorConfig)
    ppo_micro_batch_size_per_gpu: int | None = inherits(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", ActorConfig)
    forward_micro_batch_size_per_gpu: int | None = key(None, "Sequences per forward. Null: as with backward.", ge=1)
    use_dynamic_bsz: bool = inherits(f"{_ACTOR}.use_dynamic_bsz", ActorConfig)
    ppo_max_token_len_per_gpu: int = key(32768, "Tokens per micro-batch with `use_dynamic_bsz`.", ge=1)
    min_num_micro_batch: int = inherits(f"{_ACTOR}.min_num_micro_batch", ActorConfig)
    forward_max_token_len_per_gpu: int | None = key(None, "Tokens per forward alone. Null: as with backward.", ge=1)
    ppo_epochs: int = inherits(f"{_ACTOR}.ppo_epochs", ActorConfig)
    shuffle: bool = inherits(f"{_ACTOR}.shuffle", ActorConfig)
    grad_clip: float = key(1.0, "Largest gradient norm.", gt=0)
    cliprange_value: float = key(0.5, "Clip range of the value loss.", gt=0)
    loss_agg_mode: LossAggMode = inherits(f"{_ACTOR}.loss_agg_mode", ActorConfig)
    nccl_timeout: int | None = key(
        None, "Seconds before a stuck collective fails. Null: `actor_rollout_ref.nccl_timeout`.", ge=1
    )

    @property
    def forward_micro_batch_size(self) -> int | None:
        """Sequences per forward on one device."""
        return self.forward_micro_batch_size_per_gpu or self.ppo_micro_batch_size_per_gpu

    @property
    def forward_max_token_len(self) -> int:
        """Tokens per forward on one device."""
        return self.forward_max_token_len_per_gpu or self.ppo_max_token_len_per_gpu
