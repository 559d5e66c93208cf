"""Qwen3 with experts: the attention of Qwen3, a softmax router over experts in some or all layers."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.backends.megatron.families.base import Table
from dovetail.backends.megatron.families.llama import DENSE_MLP, Qwen3Family
from dovetail.backends.megatron.families.shards import Columns, GateUp, Whole

EXPERTS: Table = {
    "pre_mlp_layernorm.weight": Whole(("post_attention_layernorm.weight",)),
    "mlp.router.weight": Whole(("mlp.gate.weight",)),
    "mlp.experts.linear_fc1.weight": GateUp(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
    ),
    "mlp.experts.linear_fc2.weight": Columns(("mlp.experts.{expert}.down_proj.weight",)),
}


class Qwen3MoeFamily(Qwen3Family):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    def transformer_config(self, hf_config: Any) -> dict[str, Any]:
        layers = range(hf_config.num_hidden_layers)
        return {
            **super().transformer_config(hf_config),
            **expert_fields(hf_config.num_experts, hf_config.num_experts_per_tok, hf_config.moe_intermediate_size),
            # The largest logits, then a softmax over them, is a softmax over all, then normalised: what HF calls norm.
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
            "moe_layer_freq": [int(has_experts(hf_config, layer)) for layer in layers],
        }

    def layer_table(self, hf_config: Any, layer: int) -> Table:
        return {**self.attention_table(hf_config), **(EXPERTS if has_experts(hf_config, layer) else DENSE_MLP)}


def expert_fields(num_experts: int, experts_per_token: int, width: int) -> dict[str, Any]:
    """Fields of `TransformerConfig` about experts, without a loss that balances them: policies are not pre-trained."""
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": experts_per_token,
        "moe_ffn_hidden_size": width,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
    }


def has_experts(hf_config: Any, layer: int) -> bool:
    """As transformers decides it."""
    return layer not in (hf_config.mlp_only_layers or ()) and (layer + 1) % hf_config.decoder_sparse_step == 0
