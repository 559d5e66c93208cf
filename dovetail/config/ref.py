"""`actor_rollout_ref.ref.*`: the frozen reference policy. What is not set is the actor's."""

from __future__ import annotations

from dovetail.config.actor import ULYSSES, ActorConfig, RoleConfig, Strategy
from dovetail.config.base import inherits, section, unused, when_is
from dovetail.config.fsdp import Dtype
from dovetail.config.megatron import MegatronConfig

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
_NO_REFERENCE = f"no reference is computed without {_ACTOR}.use_kl_loss or algorithm.use_kl_in_reward"


class RefMegatronConfig(MegatronConfig):
    """Parallelism of the reference: the actor's unless set."""

    tensor_model_parallel_size: int = inherits(f"{_MEGATRON}.tensor_model_parallel_size", MegatronConfig)
    pipeline_model_parallel_size: int = inherits(f"{_MEGATRON}.pipeline_model_parallel_size", MegatronConfig)
    virtual_pipeline_model_parallel_size: int | None = inherits(
        f"{_MEGATRON}.virtual_pipeline_model_parallel_size", MegatronConfig
    )
    context_parallel_size: int = inherits(f"{_MEGATRON}.context_parallel_size", MegatronConfig)
    expert_model_parallel_size: int = inherits(f"{_MEGATRON}.expert_model_parallel_size", MegatronConfig)
    expert_tensor_parallel_size: int | None = inherits(f"{_MEGATRON}.expert_tensor_parallel_size", MegatronConfig)
    sequence_parallel: bool = inherits(f"{_MEGATRON}.sequence_parallel", MegatronConfig)
    param_offload: bool = inherits(f"{_MEGATRON}.param_offload", MegatronConfig)
    dtype: Dtype = inherits(f"{_MEGATRON}.dtype", MegatronConfig)
    override_transformer_config: dict = inherits(f"{_MEGATRON}.override_transformer_config", MegatronConfig)


class RefConfig(RoleConfig):
    """Reference policy: forward only."""

    rules = (unused(_NO_REFERENCE, when_is("uses_reference", False)),)

    strategy: Strategy = inherits(f"{_ACTOR}.strategy", ActorConfig)
    log_prob_micro_batch_size_per_gpu: int | None = inherits(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", ActorConfig)
    log_prob_use_dynamic_bsz: bool = inherits(f"{_ACTOR}.use_dynamic_bsz", ActorConfig)
    log_prob_max_token_len_per_gpu: int = inherits(f"{_ACTOR}.ppo_max_token_len_per_gpu", ActorConfig)
    ulysses_sequence_parallel_size: int = inherits(
        f"{_ACTOR}.ulysses_sequence_parallel_size", ActorConfig, rules=ULYSSES
    )
    use_torch_compile: bool = inherits(f"{_ACTOR}.use_torch_compile", ActorConfig)
    megatron: RefMegatronConfig = section(RefMegatronConfig)
