"""From a role's configuration to Megatron's own: `TransformerConfig`, its optimizer's and its data parallelism's.

What follows from the architecture is the family's (`families`); what a user sets in `override_*_config` is laid over
all of it, except what would make the training wrong, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.backends.megatron.families.base import MegatronFamily
from dovetail.backends.megatron.layout import MegatronLayout
from dovetail.backends.megatron.no_te import has_transformer_engine
from dovetail.config.fsdp import full_dtype
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig

RECOMPUTE_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def compute_dtype(config: MegatronConfig) -> torch.dtype:
    """Of weights and activations."""
    dtype = getattr(torch, full_dtype(config.dtype))
    if dtype == torch.float16:
        raise ValueError("megatron.dtype=float16 needs loss scaling, which is not done here; use bfloat16 or float32.")
    return dtype


def transformer_config(
    family: MegatronFamily,
    hf_config: Any,
    config: MegatronConfig,
    layout: MegatronLayout,
    *,
    recompute: bool,
    device: torch.device,
) -> Any:
    """The `TransformerConfig` of a role."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    dtype = compute_dtype(config)
    fields: dict[str, Any] = {
        **_ALWAYS,
        **_NO_FUSIONS,
        # SwiGLU as one kernel by torch.compile; on a CPU compiling it costs a minute.
        "bias_activation_fusion": device.type == "cuda",
        **family.transformer_config(hf_config),
        **_parallel_fields(config, layout),
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,  # every weight is read from a folder
        **(RECOMPUTE_ALL if recompute else {}),
        **_checked_overrides(config.override_transformer_config),
    }
    return (MLATransformerConfig if family.uses_mla else TransformerConfig)(**fields)


def ddp_config(config: MegatronConfig) -> Any:
    """How gradients are reduced: added up in float32, once a step."""
    from megatron.core.distributed import DistributedDataParallelConfig

    overrides = dict(config.override_ddp_config)
    if overrides.get("overlap_param_gather"):
        raise ValueError(
            "megatron.override_ddp_config.overlap_param_gather=True leaves weights incomplete between steps, when they "
            "are sent to the engine; leave it out."
        )
    fields = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_grad_reduce": False,
        **overrides,
    }
    return DistributedDataParallelConfig(**fields)


def optimizer_config(optim: OptimConfig, config: MegatronConfig, max_grad_norm: float) -> Any:
    """The same optimizer as the other backends build, in Megatron's words."""
    from megatron.core.optimizer import OptimizerConfig

    dtype = compute_dtype(config)
    fields = {
        "optimizer": "sgd" if optim.optimizer == "SGD" else "adam",
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "decoupled_weight_decay": optim.optimizer == "AdamW",
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "sgd_momentum": optim.momentum,
        "clip_grad": max_grad_norm,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        **(optim.override_optimizer_config or {}),
    }
    return OptimizerConfig(**fields)


_ALWAYS: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Micro-batches differ in length, and the validation of that wants this dispatcher for dense models too.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    # The loss function gives shares that add up, so nothing may be divided by micro-batches or ranks. This switch
    # leaves sums as they are; the division by tokens that comes with it is left out in `schedule`.
    "calculate_per_token_loss": True,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    # A router's bias is a part of the policy here, not a means of pre-training: it changes by no rule of its own.
    "moe_router_bias_update_rate": 0.0,
    "moe_grouped_gemm": True,
    "batch_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
}
_NO_FUSIONS: dict[str, Any] = {
    # Kernels of Apex and Transformer Engine, or compiled anew for every length of a batch.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}


def _parallel_fields(config: MegatronConfig, layout: MegatronLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "virtual_pipeline_model_parallel_size": layout.vpp_size if layout.vpp_size > 1 else None,
        # Between two stages activations and gradients go to the same neighbour. In one exchange Megatron takes the
        # shape of one for that of the other (p2p_communication.py, `_communicate_shapes`); overlapped, they are two.
        "overlap_p2p_comm": layout.vpp_size > 1,
        "context_parallel_size": layout.cp_size,
        "expert_model_parallel_size": layout.ep_size,
        "expert_tensor_parallel_size": layout.etp_size,
        "sequence_parallel": config.sequence_parallel and layout.tp_size > 1,
    }


def _checked_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    wrong = {
        "calculate_per_token_loss": "the loss is normalised by the mini-batch",
        "variable_seq_lengths": "micro-batches differ in length",
    }
    for name, why in wrong.items():
        if name in overrides:
            raise ValueError(f"megatron.override_transformer_config.{name} cannot be set: {why}. Take it out.")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers"):
        if overrides.get(name):
            raise ValueError(
                f"megatron.override_transformer_config.{name}={overrides[name]} adds a loss of pre-training, which is "
                "not a part of an update here; take it out, or set it to null."
            )
    if overrides.get("fp8") and not has_transformer_engine():
        raise ValueError("megatron.override_transformer_config.fp8 needs Transformer Engine, which is not installed.")
    return dict(overrides)
