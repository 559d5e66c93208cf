"""`actor_rollout_ref.actor.*`: how the policy is updated."""

from __future__ import annotations

from typing import ClassVar, Literal

from dovetail.config.base import Rule, Section, key, read_with, section, unused, when_is
from dovetail.config.checkpoint import CheckpointConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.names import POLICY_LOSSES
from dovetail.config.optim import OptimConfig

Strategy = Literal["single", "fsdp", "fsdp2", "megatron"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A trailing + takes the gradient of the unbiased k2 estimate whatever the value's estimator.
KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip


_CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl")


def _of_loss(*names: str) -> Rule:
    """Read by these built-in losses. One that a user registers may read any key."""
    return read_with("loss_mode_in_force", *names, known=POLICY_LOSSES)


class PolicyLossConfig(Section):
    """Which policy loss, and the numbers only that loss uses."""

    loss_mode: str = key(
        "vanilla",
        "vanilla, reinforce, gspo, cispo, geo_mean, sapo, gpg, dro, clip_cov, kl_cov, dppo_tv or dppo_kl; "
        "other names need `trainer.import_modules`.",
    )
    clip_cov_ratio: float = key(
        0.0002, "Share of tokens clipped by `clip_cov`.", ge=0, le=1, rules=_of_loss("clip_cov")
    )
    clip_cov_lb: float = key(1.0, "Lower covariance bound of `clip_cov`.", rules=_of_loss("clip_cov"))
    clip_cov_ub: float = key(5.0, "Upper covariance bound of `clip_cov`.", rules=_of_loss("clip_cov"))
    kl_cov_ratio: float = key(0.0002, "Share of tokens penalised by `kl_cov`.", ge=0, le=1, rules=_of_loss("kl_cov"))
    ppo_kl_coef: float = key(0.1, "Weight of the penalty of `kl_cov`.", ge=0, rules=_of_loss("kl_cov"))
    dro_beta: float = key(0.1, "Weight of the quadratic penalty of `dro`.", ge=0, rules=_of_loss("dro"))


class ActorConfig(Section):
    """Policy update."""

    rules: ClassVar[tuple[Rule, ...]] = (
        read_with(".use_kl_loss", True, only="kl_loss_coef kl_loss_type", unless=(0,)),
        unused("strategy=megatron trains models of text", when_is("strategy", "megatron"), only="freeze_vision_tower"),
        unused(
            "the head of strategy=megatron keeps nothing for the entropy; model.use_fused_kernels=True goes in chunks",
            when_is("strategy", "megatron"),
            only="entropy_from_logits_with_chunking entropy_checkpointing",
        ),
        unused(
            "actor_rollout_ref.model.use_fused_kernels=True keeps nothing for the entropy",
            when_is("actor_rollout_ref.model.use_fused_kernels", True),
            only="entropy_checkpointing",
        ),
        unused(
            "the update computes no entropy without {section}.entropy_coeff or calculate_entropy",
            when_is("needs_entropy", False),
            only="entropy_checkpointing",
        ),
    )

    strategy: Strategy = key("fsdp2", "Training backend: single (one process), fsdp, fsdp2, megatron.")
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step, over all devices.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences per forward and backward on one device. Null needs `use_dynamic_bsz`.", ge=1
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by token count instead of sequence count.")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens per micro-batch with `use_dynamic_bsz`.", ge=1)
    min_num_micro_batch: int = key(
        1,
        "Micro-batches of an update with `use_dynamic_bsz` at least, e.g. to fill a pipeline.",
        ge=1,
        rules=read_with(".use_dynamic_bsz", True),
    )
    ppo_epochs: int = key(1, "Passes over a batch.", ge=1)
    shuffle: bool = key(False, "Shuffle the mini-batches of a batch.")
    grad_clip: float = key(1.0, "Largest gradient norm.", gt=0)
    clip_ratio: float = key(0.2, "PPO clip range when the two below are null.", ge=0, rules=_of_loss(*_CLIPPED))
    clip_ratio_low: float | None = key(None, "Lower clip range. Null: `clip_ratio`.", ge=0, rules=_of_loss(*_CLIPPED))
    clip_ratio_high: float | None = key(None, "Upper clip range. Null: `clip_ratio`.", ge=0, rules=_of_loss(*_CLIPPED))
    clip_ratio_c: float = key(
        3.0, "Bound of dual-clip PPO for negative advantages.", gt=1, rules=_of_loss("vanilla", "dppo_tv", "dppo_kl")
    )
    tau_pos: float = key(1.0, "Temperature of `sapo` for positive advantages.", gt=0, rules=_of_loss("sapo"))
    tau_neg: float = key(1.05, "Temperature of `sapo` for negative advantages.", gt=0, rules=_of_loss("sapo"))
    loss_agg_mode: LossAggMode = key(
        "token-mean",
        "How token losses become one number.",
        rules=unused(
            "this loss_mode has its own aggregation; the mode is that of the entropy and the KL alone",
            when_is("loss_mode_in_force", "geo_mean", "sapo"),
        ),
    )
    loss_scale_factor: float | None = key(
        None, "Divisor of `seq-mean-token-sum-norm`. Null: `data.max_response_length`.", gt=0
    )
    calculate_sum_pi_squared: bool = key(
        False, "Add the column `sum_pi_squared` for an estimator of yours; the built-in ones get it anyway."
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    calculate_entropy: bool = key(False, "Report the entropy even when its weight is 0.")
    use_kl_loss: bool = key(False, "Add the KL to the reference model to the loss (GRPO).")
    kl_loss_coef: float = key(0.001, "Weight of that KL.", ge=0)
    kl_loss_type: KLEstimator = key("low_var_kl", "Estimator of that KL.")
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "Policy loss.")
    ulysses_sequence_parallel_size: int = key(1, "Devices that share each sequence (Ulysses).", ge=1)
    entropy_from_logits_with_chunking: bool = key(False, "Compute the entropy chunk by chunk.")
    entropy_checkpointing: bool = key(False, "Recompute the entropy in the backward pass.")
    use_torch_compile: bool = key(True, "Compile the decoder layers (CUDA only; a CPU run ignores it).")
    freeze_vision_tower: bool = key(False, "Do not train the vision tower.")
    optim: OptimConfig = section(OptimConfig, "Optimizer.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Checkpoint contents.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding with fsdp and fsdp2.")
    megatron: MegatronConfig = section(MegatronConfig, "Parallelism with megatron.")

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
