"""`actor_rollout_ref.actor.*`: how the policy is updated."""

from __future__ import annotations

from typing import Literal

from dovetail.config.base import Rule, Section, key, read_with, section, unsupported, unused, when_is
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.names import POLICY_LOSSES, listed
from dovetail.config.optim import OptimConfig

Content = Literal["model", "optimizer", "extra", "hf_model"]
Strategy = Literal["single", "fsdp", "fsdp2", "megatron"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A trailing + takes the gradient of the unbiased k2 estimate whatever the value's estimator.
KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
# Weighted by policy / engine: it needs a gradient, so it is for the loss alone.
KLLossEstimator = Literal[KLEstimator, "k3_unbiased"]

_MEGATRON = when_is("strategy", "megatron")
ULYSSES = unused("strategy=megatron cuts sequences by its section's context_parallel_size", _MEGATRON)
_ROLLOUT = "actor_rollout_ref.rollout"
_FUSED = "actor_rollout_ref.model.use_fused_kernels"
_ENTROPY = "entropy_from_logits_with_chunking entropy_checkpointing"
_NO_ENTROPY = "the update computes no entropy without {section}.entropy_coeff or calculate_entropy"
_CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl")


def _of_loss(keys: str, *names: str) -> Rule:
    """`keys` are read by these built-in losses. One that a user registers may read any key."""
    return read_with("loss_mode_in_force", *names, known=POLICY_LOSSES, only=keys)


class PolicyLossConfig(Section):
    """Which policy loss, and the numbers only that loss uses."""

    rules = (
        _of_loss("clip_cov_*", "clip_cov"),
        _of_loss("kl_cov_ratio ppo_kl_coef", "kl_cov"),
        _of_loss("dro_beta", "dro"),
        _of_loss("vespo_*", "vespo"),
    )

    loss_mode: str = key("vanilla", listed(POLICY_LOSSES))
    clip_cov_ratio: float = key(0.0002, "Share of tokens clipped by `clip_cov`.", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "Lower covariance bound of `clip_cov`.")
    clip_cov_ub: float = key(5.0, "Upper covariance bound of `clip_cov`.")
    kl_cov_ratio: float = key(0.0002, "Share of tokens penalised by `kl_cov`.", ge=0, le=1)
    ppo_kl_coef: float = key(0.1, "Weight of the penalty of `kl_cov`.", ge=0)
    dro_beta: float = key(0.1, "Weight of the quadratic penalty of `dro`.", ge=0)
    vespo_k_pos: float = key(2.0, "Power of `vespo` for advantages >= 0: larger, less weight where ratio < 1.", ge=0)
    vespo_lambda_pos: float = key(3.0, "Decay of `vespo` for them: larger, less weight where ratio > 1.", ge=0)
    vespo_k_neg: float = key(3.0, "Power of `vespo` for negative advantages.", ge=0)
    vespo_lambda_neg: float = key(2.0, "Decay of `vespo` for negative advantages.", ge=0)
    off_policy_mask_threshold: float | None = key(
        None,
        "Leave negative advantages of a response out of the loss when the mean of log(engine / policy) over its tokens "
        "is above this, e.g. 0.5 (DeepSeek-V3.2). Null: off.",
        ge=0,
    )


class CheckpointConfig(Section):
    """Contents of saved and loaded checkpoints."""

    save_contents: list[Content] = key(
        ["model", "optimizer", "extra"],
        "What to save: sharded weights, optimizer state, schedule and RNG, a Hugging Face folder.",
        was="contents",
    )
    load_contents: list[Content] | None = key(None, "What to load. Null: what was saved.")
    async_save: bool = key(False, "Write in the background while training goes on.")


class RoleConfig(Section):
    """A role that computes with a training backend."""

    strategy: Strategy = key("fsdp2", "Training backend: single (one process), fsdp, fsdp2, megatron.")
    ulysses_sequence_parallel_size: int = key(1, "Devices that share each sequence (Ulysses).", ge=1, rules=ULYSSES)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron: MegatronConfig = section(MegatronConfig)

    @property
    def offloading(self) -> FSDPConfig | MegatronConfig:
        """The section whose `param_offload` and `optimizer_offload` count."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config

    @property
    def compute_dtype(self) -> str:
        """Dtype of weights and activations in forward and backward."""
        return self.megatron.dtype if self.strategy == "megatron" else self.fsdp_config.mixed_precision.param_dtype


class RouterReplayConfig(Section):
    """Experts of a mixture, recorded and replayed."""

    mode: Literal["disabled", "R2", "R3"] = key(
        "disabled",
        "Send every token to the experts that were recorded for it, not to those its router chooses now. R2: those of "
        "the pass for old log-probs, in the update. R3: those of the engine, in that pass and in the update.",
        rules=(
            unused("trainer.method={trainer.method} samples no responses", when_is("generates", False)),
            unsupported("megatron routes by itself; use fsdp2", when=_MEGATRON),
            unsupported("with rollout.exact engine and trainer choose alike", when=when_is(f"{_ROLLOUT}.exact", True)),
            unsupported(
                "the pass for old log-probs, which R2 replays, is left out by rollout_correction.bypass_mode; use R3",
                "R2",
                when=when_is("algorithm.rollout_correction.bypass_mode", True),
            ),
            Rule(
                "unused",
                "the update makes the old log-probs itself, so there is no earlier pass to replay",
                when_is("needs_old_log_probs", False),
                ("R2",),
            ),
            unsupported(
                f"it replays what the engine returns; leave {_ROLLOUT}.enable_rollout_routing_replay out",
                "R3",
                when=when_is(f"{_ROLLOUT}.enable_rollout_routing_replay", False),
            ),
        ),
    )


class ActorConfig(RoleConfig):
    """Policy update."""

    rules = (
        _of_loss("clip_ratio clip_ratio_low clip_ratio_high", *_CLIPPED),
        _of_loss("clip_ratio_c", "vanilla", "dppo_tv", "dppo_kl"),
        _of_loss("tau_pos tau_neg", "sapo"),
        read_with(".use_kl_loss", True, only="kl_loss_coef kl_loss_type", unless=(0,)),
        read_with(".loss_agg_mode", "seq-mean-token-sum-norm", only="loss_scale_factor"),
        read_with(".use_dynamic_bsz", True, only="min_num_micro_batch"),
        read_with(".use_dynamic_bsz", False, only="ppo_micro_batch_size_per_gpu"),
        unused("strategy=megatron computes every sequence", _MEGATRON, only="use_prefix_grouper"),
        unused("strategy=megatron trains models of text", _MEGATRON, only="freeze_vision_tower"),
        unused("the head of strategy=megatron keeps nothing for the entropy", _MEGATRON, only=_ENTROPY),
        unused(f"{_FUSED}=True keeps nothing for the entropy", when_is(_FUSED, True), only=_ENTROPY),
        unused(_NO_ENTROPY, when_is("needs_entropy", False), only="entropy_checkpointing"),
        unused(
            "this loss_mode has its own aggregation; the mode is that of the entropy and the KL alone",
            when_is("loss_mode_in_force", "geo_mean", "sapo"),
            only="loss_agg_mode",
        ),
    )

    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step, over all devices.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences on one device at a time. Null: `use_dynamic_bsz`.", ge=1
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by token count instead of sequence count.")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens per micro-batch with `use_dynamic_bsz`.", ge=1)
    min_num_micro_batch: int = key(1, "Fewest micro-batches of an update, e.g. to fill a pipeline.", ge=1)
    ppo_epochs: int = key(1, "Passes over a batch.", ge=1)
    shuffle: bool = key(False, "Shuffle the mini-batches of a batch.")
    grad_clip: float = key(1.0, "Largest gradient norm.", gt=0)
    clip_ratio: float = key(0.2, "PPO clip range when the two below are null.", ge=0)
    clip_ratio_low: float | None = key(None, "Lower clip range. Null: `clip_ratio`.", ge=0)
    clip_ratio_high: float | None = key(None, "Upper clip range. Null: `clip_ratio`.", ge=0)
    clip_ratio_c: float = key(3.0, "Bound of dual-clip PPO for negative advantages.", gt=1)
    tau_pos: float = key(1.0, "Temperature of `sapo` for positive advantages.", gt=0)
    tau_neg: float = key(1.05, "Temperature of `sapo` for negative advantages.", gt=0)
    loss_agg_mode: LossAggMode = key("token-mean", "How token losses become one number.")
    loss_scale_factor: float | None = key(None, "Divisor of `seq-mean-token-sum-norm`. Null: response length.", gt=0)
    calculate_sum_pi_squared: bool = key(False, "Add the column `sum_pi_squared` for an estimator of yours.")
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    calculate_entropy: bool = key(False, "Report the entropy even when its weight is 0.")
    use_kl_loss: bool = key(False, "Add the KL to the reference model to the loss (GRPO).")
    kl_loss_coef: float = key(0.001, "Weight of that KL.", ge=0)
    kl_loss_type: KLLossEstimator = key(
        "low_var_kl", "Estimator of that KL. k3_unbiased: low_var_kl weighted by policy / engine (DeepSeek-V3.2)."
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    entropy_from_logits_with_chunking: bool = key(False, "Compute the entropy chunk by chunk.")
    entropy_checkpointing: bool = key(False, "Recompute the entropy in the backward pass.")
    use_prefix_grouper: bool = key(
        True,
        "Compute what the sequences of a micro-batch begin with alike once: the prompt of a group, the turns that "
        "conversations share. Log-probs and gradients are the same. It acts on packed sequences of the policy and the "
        "reference, and keeps the responses to a prompt in one micro-batch.",
    )
    use_torch_compile: bool = key(
        True,
        "Compile the decoder layers (CUDA only; a CPU run ignores it). On Megatron: those of dense models with "
        "TP = PP = CP = 1, without Transformer Engine and without overrides of its transformer's configuration.",
    )
    fp8_recipe: Literal["rowwise", "rowwise_with_gw_hp"] | None = key(
        None,
        "Products of the layers' projections in fp8, quantised by row: in forward and backward (rowwise), or with the "
        "weights' gradients left in the compute dtype (rowwise_with_gw_hp). Needs a GPU of compute capability 8.9; a "
        "CPU emulates it. Null: off.",
        rules=(
            unsupported("megatron has override_transformer_config.fp8 for it; use null", when=_MEGATRON),
            unsupported("fp8 trains no adapters; use null", when=when_is("actor_rollout_ref.model.uses_lora", True)),
        ),
    )
    freeze_vision_tower: bool = key(False, "Do not train the vision tower.")
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    optim: OptimConfig = section(OptimConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

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
