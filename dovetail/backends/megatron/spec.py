"""Which modules a decoder layer is made of: Transformer Engine's where it is installed, ours in plain torch elsewhere.

Both give the same parameter names, so weights and checkpoints do not tell which was used.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from dovetail.backends.megatron.attention import TorchCoreAttention
from dovetail.backends.megatron.no_te import has_transformer_engine
from dovetail.backends.megatron.torch_layers import (
    TorchColumnParallelGroupedLinear,
    TorchLayerNormColumnParallelLinear,
    TorchLinear,
    TorchRMSNorm,
    TorchRowParallelGroupedLinear,
)


def decoder_block_spec(
    config: Any, vp_stage: int | None = None, *, dense_layer: type[TransformerLayer] = TransformerLayer
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and virtual stage); those without experts are of the class `dense_layer`."""
    if has_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    dense, moe = _layer_spec(config, num_experts=None, layer=dense_layer), None
    if config.num_moe_experts is not None:
        moe = _layer_spec(config, num_experts=config.num_moe_experts)
    layers = [moe if moe is not None and is_moe else dense for is_moe in _moe_pattern(config)]
    return TransformerBlockSubmodules(
        layer_specs=[layers[index] for index in _own_layers(config, vp_stage)], layer_norm=TorchRMSNorm
    )


class TorchSpecProvider(BackendSpecProvider):
    """Megatron's own point of extension for the modules of a layer."""

    def linear(self) -> type:
        return TorchLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TorchLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TorchRMSNorm

    def core_attention(self) -> type:
        return TorchCoreAttention

    def activation_func(self) -> Any:
        return None

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        if moe_use_grouped_gemm:
            grouped = MLPSubmodules(
                linear_fc1=TorchColumnParallelGroupedLinear, linear_fc2=TorchRowParallelGroupedLinear
            )
            return TEGroupedMLP, grouped
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _moe_pattern(config: Any) -> list[bool]:
    """Which layers have experts, as `moe_layer_freq` says it: every so many, or one number for each layer."""
    freq = config.moe_layer_freq
    if isinstance(freq, int):
        return [index % freq == 0 for index in range(config.num_layers)]
    assert len(freq) == config.num_layers, f"moe_layer_freq names {len(freq)} of {config.num_layers} layers"
    return [bool(flag) for flag in freq]


def _own_layers(config: Any, vp_stage: int | None) -> list[int]:
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _layer_spec(
    config: Any, *, num_experts: int | None, layer: type[TransformerLayer] = TransformerLayer
) -> ModuleSpec:
    provider = TorchSpecProvider()
    mlp = get_mlp_module_spec_for_backend(
        backend=provider, num_experts=num_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    # MLA's down projections cannot hold the norm before them; elsewhere it is inside the first linear layer.
    own_norm = {"input_layernorm": TorchRMSNorm} if config.multi_latent_attention else {}
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            **own_norm,
            self_attention=_latent_attention(config) if config.multi_latent_attention else _attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TorchRMSNorm if num_experts else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(config: Any) -> ModuleSpec:
    qk_norm = TorchRMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=TorchLayerNormColumnParallelLinear,
            core_attention=TorchCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent_attention(config: Any) -> ModuleSpec:
    up_projection = TorchLayerNormColumnParallelLinear if config.qk_layernorm else ColumnParallelLinear
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=TorchLinear,
            linear_q_up_proj=up_projection,
            linear_kv_down_proj=TorchLinear,
            linear_kv_up_proj=up_projection,
            core_attention=TorchCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
