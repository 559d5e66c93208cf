"""`*.megatron.*`: how Megatron-core splits a model over devices."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dovetail.config.base import Section
from dovetail.config.fsdp import Dtype
from dovetail.config.home import HomePath


class MegatronConfig(Section):
    """Tensor, pipeline, expert and context parallelism of one role."""

    tensor_model_parallel_size: int = Field(1, ge=1, description="Devices that share each layer.")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages.")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=1, description="Model chunks per stage (interleaved schedule). Null: one."
    )
    context_parallel_size: int = Field(1, ge=1, description="Devices that share each sequence.")
    expert_model_parallel_size: int = Field(1, ge=1, description="Devices that share the experts of a layer.")
    expert_tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices that share one expert. Null: `tensor_model_parallel_size`."
    )
    sequence_parallel: bool = Field(True, description="Split norms and dropouts along the sequence (needs TP > 1).")
    param_offload: bool = Field(False, description="Keep the weights in host memory between phases.")
    grad_offload: bool = Field(False, description="Keep the gradient buffers in host memory between updates.")
    optimizer_offload: bool = Field(False, description="Keep the optimizer state in host memory between updates.")
    use_distributed_optimizer: bool = Field(True, description="Shard the optimizer state over data-parallel ranks.")
    dtype: Dtype = Field("bfloat16", description="Dtype of weights and activations; master weights are float32.")
    use_dist_checkpointing: bool = Field(False, description="Load the start weights from a Megatron checkpoint.")
    dist_checkpointing_path: HomePath | None = Field(None, description="Folder of that Megatron checkpoint.")
    dist_checkpointing_prefix: str = Field("", description="Prefix of the weight names in that checkpoint.")
    override_transformer_config: dict[str, Any] = Field(
        {}, description="Extra fields of Megatron's `TransformerConfig` (free-form)."
    )
    override_ddp_config: dict[str, Any] = Field(
        {}, description="Extra fields of Megatron's `DistributedDataParallelConfig` (free-form)."
    )
    override_mcore_model_config: dict[str, Any] = Field(
        {}, description="Extra arguments of Megatron's `GPTModel` (free-form)."
    )

    @property
    def expert_tensor_size(self) -> int:
        """Devices that share one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one replica of the dense part: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
