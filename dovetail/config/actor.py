"""`actor_rollout_ref.actor.*`: how the policy is updated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.base import Section
from dovetail.config.checkpoint import CheckpointConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig

Strategy = Literal["single", "fsdp", "fsdp2", "megatron"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A trailing + takes the gradient of the unbiased k2 estimate whatever the value's estimator.
KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip


class PolicyLossConfig(Section):
    """Which policy loss, and the numbers only that loss uses."""

    loss_mode: str = Field(
        "vanilla",
        description="vanilla, reinforce, gspo, cispo, geo_mean, sapo, gpg, dro, clip_cov, kl_cov, dppo_tv or dppo_kl; "
        "other names need `trainer.import_modules`.",
    )
    clip_cov_ratio: float = Field(0.0002, ge=0, le=1, description="Share of tokens clipped by `clip_cov`.")
    clip_cov_lb: float = Field(1.0, description="Lower covariance bound of `clip_cov`.")
    clip_cov_ub: float = Field(5.0, description="Upper covariance bound of `clip_cov`.")
    kl_cov_ratio: float = Field(0.0002, ge=0, le=1, description="Share of tokens penalised by `kl_cov`.")
    ppo_kl_coef: float = Field(0.1, ge=0, description="Weight of the penalty of `kl_cov`.")
    dro_beta: float = Field(0.1, ge=0, description="Weight of the quadratic penalty of `dro`.")


class ActorConfig(Section):
    """Policy update."""

    strategy: Strategy = Field("fsdp2", description="Training backend: single (one process), fsdp, fsdp2, megatron.")
    ppo_mini_batch_size: int = Field(256, ge=1, description="Prompts per optimizer step, over all devices.")
    ppo_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Sequences per forward and backward on one device. Null needs `use_dynamic_bsz`."
    )
    use_dynamic_bsz: bool = Field(False, description="Cut micro-batches by token count instead of sequence count.")
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1, description="Tokens per micro-batch with `use_dynamic_bsz`.")
    min_num_micro_batch: int = Field(
        1, ge=1, description="Micro-batches of an update with `use_dynamic_bsz` at least, e.g. to fill a pipeline."
    )
    ppo_epochs: int = Field(1, ge=1, description="Passes over a batch.")
    shuffle: bool = Field(False, description="Shuffle the mini-batches of a batch.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    clip_ratio: float = Field(0.2, ge=0, description="PPO clip range when the two below are null.")
    clip_ratio_low: float | None = Field(None, ge=0, description="Lower clip range. Null: `clip_ratio`.")
    clip_ratio_high: float | None = Field(None, ge=0, description="Upper clip range. Null: `clip_ratio`.")
    clip_ratio_c: float = Field(3.0, gt=1, description="Bound of dual-clip PPO for negative advantages.")
    tau_pos: float = Field(1.0, gt=0, description="Temperature of `sapo` for positive advantages.")
    tau_neg: float = Field(1.05, gt=0, description="Temperature of `sapo` for negative advantages.")
    loss_agg_mode: LossAggMode = Field("token-mean", description="How token losses become one number.")
    loss_scale_factor: float | None = Field(
        None, gt=0, description="Divisor of `seq-mean-token-sum-norm`. Null: `data.max_response_length`."
    )
    calculate_sum_pi_squared: bool = Field(
        False,
        description="Add the column `sum_pi_squared` for an estimator of yours; the built-in ones get it anyway.",
    )
    entropy_coeff: float = Field(0.0, description="Weight of the entropy bonus.")
    calculate_entropy: bool = Field(False, description="Report the entropy even when its weight is 0.")
    use_kl_loss: bool = Field(False, description="Add the KL to the reference model to the loss (GRPO).")
    kl_loss_coef: float = Field(0.001, ge=0, description="Weight of that KL.")
    kl_loss_type: KLEstimator = Field("low_var_kl", description="Estimator of that KL.")
    policy_loss: PolicyLossConfig = Field(PolicyLossConfig.model_construct(), description="Policy loss.")
    ulysses_sequence_parallel_size: int = Field(1, ge=1, description="Devices that share each sequence (Ulysses).")
    entropy_from_logits_with_chunking: bool = Field(False, description="Compute the entropy chunk by chunk.")
    entropy_checkpointing: bool = Field(False, description="Recompute the entropy in the backward pass.")
    use_torch_compile: bool = Field(True, description="Compile the decoder layers (CUDA only; a CPU run ignores it).")
    freeze_vision_tower: bool = Field(False, description="Do not train the vision tower.")
    optim: OptimConfig = Field(OptimConfig.model_construct(), description="Optimizer.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig.model_construct(), description="Checkpoint contents.")
    fsdp_config: FSDPConfig = Field(FSDPConfig.model_construct(), description="Sharding with fsdp and fsdp2.")
    megatron: MegatronConfig = Field(MegatronConfig.model_construct(), description="Parallelism with megatron.")

    @property
    def clip_low(self) -> float:
        """Lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def needs_entropy(self) -> bool:
        """Whether the update must compute the entropy."""
        return self.calculate_entropy or self.entropy_coeff != 0

    @property
    def offloading(self) -> FSDPConfig | MegatronConfig:
        """The section whose `param_offload` and `optimizer_offload` count."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config

    @property
    def compute_dtype(self) -> str:
        """Dtype of weights and activations in forward and backward."""
        return self.megatron.dtype if self.strategy == "megatron" else self.fsdp_config.mixed_precision.param_dtype
