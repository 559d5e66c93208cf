"""`actor_rollout_ref.ref.*`: the frozen reference policy. What is not set is the actor's."""

from __future__ import annotations

from pydantic import Field

from dovetail.config.actor import ActorConfig, Strategy
from dovetail.config.base import Section, inherits
from dovetail.config.fsdp import Dtype, FSDPConfig
from dovetail.config.megatron import MegatronConfig

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"


class RefMegatronConfig(MegatronConfig):
    """Parallelism of the reference: the actor's unless set."""

    tensor_model_parallel_size: int = inherits(
        f"{_MEGATRON}.tensor_model_parallel_size",
        MegatronConfig,
        "tensor_model_parallel_size",
        description="Devices that share each layer.",
        ge=1,
    )
    pipeline_model_parallel_size: int = inherits(
        f"{_MEGATRON}.pipeline_model_parallel_size",
        MegatronConfig,
        "pipeline_model_parallel_size",
        description="Pipeline stages.",
        ge=1,
    )
    virtual_pipeline_model_parallel_size: int | None = inherits(
        f"{_MEGATRON}.virtual_pipeline_model_parallel_size",
        MegatronConfig,
        "virtual_pipeline_model_parallel_size",
        description="Model chunks per stage.",
        ge=1,
    )
    context_parallel_size: int = inherits(
        f"{_MEGATRON}.context_parallel_size",
        MegatronConfig,
        "context_parallel_size",
        description="Devices that share each sequence.",
        ge=1,
    )
    expert_model_parallel_size: int = inherits(
        f"{_MEGATRON}.expert_model_parallel_size",
        MegatronConfig,
        "expert_model_parallel_size",
        description="Devices that share the experts of a layer.",
        ge=1,
    )
    expert_tensor_parallel_size: int | None = inherits(
        f"{_MEGATRON}.expert_tensor_parallel_size",
        MegatronConfig,
        "expert_tensor_parallel_size",
        description="Devices that share one expert.",
        ge=1,
    )
    sequence_parallel: bool = inherits(
        f"{_MEGATRON}.sequence_parallel", MegatronConfig, "sequence_parallel", description="Split norms."
    )
    param_offload: bool = inherits(
        f"{_MEGATRON}.param_offload", MegatronConfig, "param_offload", description="Weights in host memory."
    )
    dtype: Dtype = inherits(f"{_MEGATRON}.dtype", MegatronConfig, "dtype", description="Dtype of weights.")
    override_transformer_config: dict = inherits(
        f"{_MEGATRON}.override_transformer_config",
        MegatronConfig,
        "override_transformer_config",
        description="Extra fields of Megatron's `TransformerConfig` (free-form).",
    )


class RefConfig(Section):
    """Reference policy: forward only."""

    strategy: Strategy = inherits(f"{_ACTOR}.strategy", ActorConfig, "strategy", description="Training backend.")
    log_prob_micro_batch_size_per_gpu: int | None = inherits(
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        ActorConfig,
        "ppo_micro_batch_size_per_gpu",
        description="Sequences per forward on one device.",
        ge=1,
    )
    log_prob_use_dynamic_bsz: bool = inherits(
        f"{_ACTOR}.use_dynamic_bsz", ActorConfig, "use_dynamic_bsz", description="Cut forwards by token count."
    )
    log_prob_max_token_len_per_gpu: int = inherits(
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        ActorConfig,
        "ppo_max_token_len_per_gpu",
        description="Tokens per forward.",
        ge=1,
    )
    ulysses_sequence_parallel_size: int = inherits(
        f"{_ACTOR}.ulysses_sequence_parallel_size",
        ActorConfig,
        "ulysses_sequence_parallel_size",
        description="Devices that share each sequence.",
        ge=1,
    )
    use_torch_compile: bool = inherits(
        f"{_ACTOR}.use_torch_compile", ActorConfig, "use_torch_compile", description="Compile the layers."
    )
    fsdp_config: FSDPConfig = Field(FSDPConfig.model_construct(), description="Sharding with fsdp and fsdp2.")
    megatron: RefMegatronConfig = Field(RefMegatronConfig.model_construct(), description="Parallelism with megatron.")

    @property
    def offloading(self) -> FSDPConfig | MegatronConfig:
        """The section whose `param_offload` and `optimizer_offload` count."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config
