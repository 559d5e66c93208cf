"""`*.megatron.*`: how Megatron-core splits a model over devices."""

from __future__ import annotations

from typing import Any

from dovetail.config.base import HomePath, Section, key, read_with, unused, when_is, when_not
from dovetail.config.fsdp import NO_OPTIMIZER, Dtype


class MegatronConfig(Section):
    """Tensor, pipeline, expert and context parallelism of one role."""

    rules = (
        unused("it is read with `strategy=megatron` only", when_not("strategy", "megatron")),
        unused("the role has no gradients", when_is("optim", None), only="override_ddp_config"),
        read_with(".use_dist_checkpointing", True, only="dist_checkpointing_*"),
    )

    tensor_model_parallel_size: int = key(1, "Devices that share each layer.", ge=1)
    pipeline_model_parallel_size: int = key(1, "Pipeline stages.", ge=1)
    virtual_pipeline_model_parallel_size: int | None = key(None, "Model chunks per stage (interleaved).", ge=1)
    context_parallel_size: int = key(1, "Devices that share each sequence.", ge=1)
    expert_model_parallel_size: int = key(1, "Devices that share the experts of a layer.", ge=1)
    expert_tensor_parallel_size: int | None = key(None, "Devices that share one expert. Null: those of a layer.", ge=1)
    sequence_parallel: bool = key(True, "Split norms and dropouts along the sequence (needs TP > 1).")
    param_offload: bool = key(False, "Keep the weights in host memory between phases.")
    grad_offload: bool = key(False, "Keep the gradient buffers in host memory between updates.", rules=NO_OPTIMIZER)
    optimizer_offload: bool = key(False, "Keep the optimizer state in host memory between updates.", rules=NO_OPTIMIZER)
    use_distributed_optimizer: bool = key(
        True, "Shard the optimizer state over data-parallel ranks.", rules=NO_OPTIMIZER
    )
    dtype: Dtype = key("bfloat16", "Dtype of weights and activations; master weights are float32.")
    use_dist_checkpointing: bool = key(False, "Load the start weights from a Megatron checkpoint.")
    dist_checkpointing_path: HomePath | None = key(None, "Folder of that Megatron checkpoint.")
    dist_checkpointing_prefix: str = key("", "Prefix of the weight names in that checkpoint.")
    override_transformer_config: dict[str, Any] = key({}, "Extra fields of Megatron's `TransformerConfig`.")
    override_ddp_config: dict[str, Any] = key({}, "Extra fields of Megatron's DDP config.")
    override_mcore_model_config: dict[str, Any] = key({}, "Extra arguments of Megatron's `GPTModel`.")

    @property
    def has_plain_layers(self) -> bool:
        """Whether one device computes each layer alone, as Megatron does by default: only then can it be compiled."""
        overrides = self.override_transformer_config or self.override_mcore_model_config
        return self.model_parallel_size == 1 and not overrides

    @property
    def expert_tensor_size(self) -> int:
        """Devices that share one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one replica of the dense part: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
