"""`*.fsdp_config.*`: how FSDP and FSDP2 shard a model. The one-process backend reads the dtypes only."""

from __future__ import annotations

from typing import Literal

from dovetail.config.base import Section, key, section, unused, when_is

Dtype = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]

_FULL_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype(name: str) -> str:
    """The torch name of a dtype: `bf16` is `bfloat16`."""
    return _FULL_NAMES.get(name, name)


# Said before any other reason: it follows from the role alone.
NO_OPTIMIZER = unused("the role has no optimizer", when_is("optim", None))
_BUFFERS = unused("buffers keep the dtype the model gives them, rotary tables float32")


class WrapPolicyConfig(Section):
    """Which modules become a sharding unit."""

    min_num_params: int = key(0, "Shard modules with at least this many parameters; 0: by class.", ge=0)
    transformer_layer_cls_to_wrap: list[str] | None = key(None, "Module classes to shard. Null: the decoder layers.")
    disable: bool = key(False, "One sharding unit for the whole model.")


class MixedPrecisionConfig(Section):
    """Dtypes during forward and backward."""

    param_dtype: Dtype = key("bfloat16", "Dtype of weights and activations in forward and backward.")
    reduce_dtype: Dtype = key("float32", "Dtype in which gradients are summed over devices.")
    buffer_dtype: Dtype = key("float32", "Dtype of buffers such as rotary tables.", rules=_BUFFERS)


class FSDPConfig(Section):
    """Sharding, offload and precision of one role."""

    rules = (
        unused("strategy=megatron shards as the role's section `megatron` says", when_is("strategy", "megatron")),
        unused(
            "one device holds the whole model",
            when_is("trainer.world_size", 1),
            only="fsdp_size reshard_after_forward forward_prefetch wrap_policy.* mixed_precision.reduce_dtype",
        ),
        unused("trainer.device=cpu has all in host memory", when_is("trainer.device", "cpu"), only="*_offload"),
    )

    fsdp_size: int = key(-1, "Devices in one sharding group; -1: all. Smaller: hybrid sharding.", ge=-1)
    param_offload: bool = key(False, "Keep the weights in host memory between phases.")
    optimizer_offload: bool = key(False, "Keep the optimizer state in host memory between updates.", rules=NO_OPTIMIZER)
    offload_policy: bool = key(False, "FSDP's own CPU offload, during forward and backward too.")
    reshard_after_forward: bool = key(True, "Free gathered weights after forward (FSDP2).")
    forward_prefetch: bool = key(False, "Gather the next layer during the current forward.")
    model_dtype: Dtype = key("float32", "Dtype of the master weights.")
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig)
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
