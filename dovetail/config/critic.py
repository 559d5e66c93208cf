"""`critic.*`: the value network of PPO. Batch sizes are the actor's unless set."""

from __future__ import annotations

from pydantic import Field

from dovetail.config.actor import ActorConfig, LossAggMode, Strategy
from dovetail.config.base import Section, inherits
from dovetail.config.checkpoint import CheckpointConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import CriticModelConfig
from dovetail.config.optim import CriticOptimConfig

_ACTOR = "actor_rollout_ref.actor"


class CriticConfig(Section):
    """Value network and its update."""

    enable: bool | None = Field(None, description="Train a critic. Null: when the advantage estimator needs values.")
    strategy: Strategy = inherits(f"{_ACTOR}.strategy", ActorConfig, "strategy", description="Training backend.")
    model: CriticModelConfig = Field(CriticModelConfig.model_construct(), description="Network.")
    fsdp_config: FSDPConfig = Field(FSDPConfig.model_construct(), description="Sharding with fsdp and fsdp2.")
    megatron: MegatronConfig = Field(MegatronConfig.model_construct(), description="Parallelism with megatron.")
    optim: CriticOptimConfig = Field(CriticOptimConfig.model_construct(), description="Optimizer.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig.model_construct(), description="Checkpoint contents.")
    ppo_mini_batch_size: int = inherits(
        f"{_ACTOR}.ppo_mini_batch_size",
        ActorConfig,
        "ppo_mini_batch_size",
        description="Prompts per optimizer step, over all devices.",
        ge=1,
    )
    ppo_micro_batch_size_per_gpu: int | None = inherits(
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        ActorConfig,
        "ppo_micro_batch_size_per_gpu",
        description="Sequences per forward and backward on one device.",
        ge=1,
    )
    forward_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Sequences per forward alone. Null: `critic.ppo_micro_batch_size_per_gpu`."
    )
    use_dynamic_bsz: bool = inherits(
        f"{_ACTOR}.use_dynamic_bsz", ActorConfig, "use_dynamic_bsz", description="Cut micro-batches by tokens."
    )
    ppo_max_token_len_per_gpu: int = Field(32768, ge=1, description="Tokens per micro-batch with `use_dynamic_bsz`.")
    min_num_micro_batch: int = inherits(
        f"{_ACTOR}.min_num_micro_batch",
        ActorConfig,
        "min_num_micro_batch",
        description="Micro-batches of an update with `use_dynamic_bsz` at least.",
        ge=1,
    )
    forward_max_token_len_per_gpu: int | None = Field(
        None, ge=1, description="Tokens per forward alone. Null: `critic.ppo_max_token_len_per_gpu`."
    )
    ppo_epochs: int = inherits(
        f"{_ACTOR}.ppo_epochs", ActorConfig, "ppo_epochs", description="Passes over a batch.", ge=1
    )
    shuffle: bool = inherits(f"{_ACTOR}.shuffle", ActorConfig, "shuffle", description="Shuffle the mini-batches.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    cliprange_value: float = Field(0.5, gt=0, description="Clip range of the value loss.")
    loss_agg_mode: LossAggMode = inherits(
        f"{_ACTOR}.loss_agg_mode", ActorConfig, "loss_agg_mode", description="How token losses become one number."
    )
    ulysses_sequence_parallel_size: int = Field(1, ge=1, description="Devices that share each sequence (Ulysses).")
    nccl_timeout: int | None = Field(
        None, ge=1, description="Seconds before a stuck collective fails. Null: `actor_rollout_ref.nccl_timeout`."
    )

    @property
    def forward_micro_batch_size(self) -> int | None:
        """Sequences per forward on one device."""
        return self.forward_micro_batch_size_per_gpu or self.ppo_micro_batch_size_per_gpu

    @property
    def forward_max_token_len(self) -> int:
        """Tokens per forward on one device."""
        return self.forward_max_token_len_per_gpu or self.ppo_max_token_len_per_gpu

    @property
    def offloading(self) -> FSDPConfig | MegatronConfig:
        """The section whose `param_offload` and `optimizer_offload` count."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config
