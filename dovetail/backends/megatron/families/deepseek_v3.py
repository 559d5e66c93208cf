"""DeepSeek-V3: latent attention, dense first layers, then experts with a sigmoid router, a bias and a shared expert.

The router's bias is data, not a parameter: it steers the choice of experts and is not trained here, as on FSDP.
Multi-token-prediction layers are left out.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.backends.megatron.families.base import MegatronFamily, Table
from dovetail.backends.megatron.families.llama import DENSE_MLP, dense_fields, model_arguments
from dovetail.backends.megatron.families.qwen3_moe import EXPERTS, expert_fields
from dovetail.backends.megatron.families.rotary import latent_rotary_fields
from dovetail.backends.megatron.families.shards import Columns, GateUp, Rows, Whole

_ATTENTION: Table = {
    "input_layernorm.weight": Whole(("input_layernorm.weight",)),
    "self_attention.linear_kv_down_proj.weight": Whole(("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.linear_kv_up_proj.layer_norm_weight": Whole(("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": Rows(("self_attn.kv_b_proj.weight",)),
    "self_attention.linear_proj.weight": Columns(("self_attn.o_proj.weight",)),
}
_LOW_RANK_QUERIES: Table = {
    "self_attention.linear_q_down_proj.weight": Whole(("self_attn.q_a_proj.weight",)),
    "self_attention.linear_q_up_proj.layer_norm_weight": Whole(("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": Rows(("self_attn.q_b_proj.weight",)),
}
_PLAIN_QUERIES: Table = {"self_attention.linear_q_proj.weight": Rows(("self_attn.q_proj.weight",))}
_SHARED_EXPERT: Table = {
    "mlp.router.expert_bias": Whole(("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": GateUp(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
    ),
    "mlp.shared_experts.linear_fc2.weight": Columns(("mlp.shared_experts.down_proj.weight",)),
}


class DeepseekV3Family(MegatronFamily):
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    uses_mla: ClassVar[bool] = True

    def transformer_config(self, hf_config: Any) -> dict[str, Any]:
        _check(hf_config)
        dense = hf_config.first_k_dense_replace
        return {
            **dense_fields(hf_config),
            **latent_rotary_fields(hf_config),
            **expert_fields(hf_config.n_routed_experts, hf_config.num_experts_per_tok, hf_config.moe_intermediate_size),
            **_router_fields(hf_config),
            "qk_layernorm": True,
            "q_lora_rank": hf_config.q_lora_rank,
            "kv_lora_rank": hf_config.kv_lora_rank,
            "qk_head_dim": hf_config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
            "v_head_dim": hf_config.v_head_dim,
            "kv_channels": hf_config.v_head_dim,
            "moe_shared_expert_intermediate_size": hf_config.n_shared_experts * hf_config.moe_intermediate_size,
            "moe_layer_freq": [int(layer >= dense) for layer in range(hf_config.num_hidden_layers)],
        }

    def gpt_model(self, hf_config: Any) -> dict[str, Any]:
        return model_arguments(hf_config)

    def layer_table(self, hf_config: Any, layer: int) -> Table:
        queries = _PLAIN_QUERIES if hf_config.q_lora_rank is None else _LOW_RANK_QUERIES
        mlp = DENSE_MLP if layer < hf_config.first_k_dense_replace else {**EXPERTS, **_SHARED_EXPERT}
        return {**_ATTENTION, **queries, **mlp}


def _router_fields(hf_config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # Megatron moves the bias towards balanced experts after every step; at rate 0 it stays what it was.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }
    groups, chosen = hf_config.n_group or 1, hf_config.topk_group or 1
    if chosen < groups:
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return fields


def _check(hf_config: Any) -> None:
    rules = {
        "hidden_act": (hf_config.hidden_act, "silu"),
        "attention_bias": (hf_config.attention_bias, False),
        "rope_interleave": (hf_config.rope_interleave, True),
        "norm_topk_prob": (hf_config.norm_topk_prob, True),
    }
    for field, (value, wanted) in rules.items():
        if value != wanted:
            raise ValueError(
                f"{field}={value} of deepseek_v3 is not built on Megatron here (only {wanted}); use fsdp2."
            )
    groups, chosen, experts = hf_config.n_group or 1, hf_config.topk_group or 1, hf_config.num_experts_per_tok
    if chosen < groups and experts // chosen != 2:
        raise ValueError(
            f"num_experts_per_tok={experts} with topk_group={chosen}: Megatron ranks groups by their best "
            f"{experts // chosen} experts, the model by its best two; use fsdp2."
        )
