"""`*.fsdp_config.*`: how FSDP and FSDP2 shard a model. The one-process backend reads the dtypes only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.base import Section

Dtype = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]

_FULL_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype(name: str) -> str:
    """The torch name of a dtype: `bf16` is `bfloat16`."""
    return _FULL_NAMES.get(name, name)


class WrapPolicyConfig(Section):
    """Which modules become a sharding unit."""

    min_num_params: int = Field(0, ge=0, description="Shard modules with at least this many parameters; 0: by class.")
    transformer_layer_cls_to_wrap: list[str] | None = Field(
        None, description="Module classes to shard. Null: the decoder layers that the model declares."
    )
    disable: bool = Field(False, description="One sharding unit for the whole model.")


class MixedPrecisionConfig(Section):
    """Dtypes during forward and backward."""

    param_dtype: Dtype = Field("bfloat16", description="Dtype of weights and activations in forward and backward.")
    reduce_dtype: Dtype = Field("float32", description="Dtype in which gradients are summed over devices.")
    buffer_dtype: Dtype = Field("float32", description="Dtype of buffers such as rotary tables.")


class FSDPConfig(Section):
    """Sharding, offload and precision of one role."""

    fsdp_size: int = Field(-1, ge=-1, description="Devices in one sharding group; -1: all. Smaller: hybrid sharding.")
    param_offload: bool = Field(False, description="Keep the weights in host memory between phases.")
    optimizer_offload: bool = Field(False, description="Keep the optimizer state in host memory between updates.")
    offload_policy: bool = Field(False, description="FSDP2's own CPU offload during forward and backward too.")
    reshard_after_forward: bool = Field(True, description="Free gathered weights after forward (FSDP2).")
    forward_prefetch: bool = Field(False, description="Gather the next layer during the current forward.")
    model_dtype: Dtype = Field("float32", description="Dtype of the master weights.")
    mixed_precision: MixedPrecisionConfig = Field(MixedPrecisionConfig.model_construct(), description="Compute dtypes.")
    wrap_policy: WrapPolicyConfig = Field(WrapPolicyConfig.model_construct(), description="Sharding units.")
