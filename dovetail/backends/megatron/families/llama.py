"""Dense decoder families: Llama, and Qwen2 and Qwen3, which say how their attention differs from it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.nn import functional

from dovetail.backends.megatron.families.base import MegatronFamily, Table
from dovetail.backends.megatron.families.rotary import Rotary, set_frequencies
from dovetail.backends.megatron.families.shards import Columns, GateUp, GroupedQkv, Whole

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

DENSE_MLP: Table = {
    "mlp.linear_fc1.layer_norm_weight": Whole(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": GateUp(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Columns(("mlp.down_proj.weight",)),
}


class LlamaFamily(MegatronFamily):
    """Also the base of the other dense families, which say how their attention differs."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False

    def transformer_config(self, hf_config: Any) -> dict[str, Any]:
        self.check(hf_config)
        return {
            **dense_fields(hf_config),
            "num_query_groups": hf_config.num_key_value_heads,
            "kv_channels": head_dim(hf_config),
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
        }

    def gpt_model(self, hf_config: Any) -> dict[str, Any]:
        return {**model_arguments(hf_config), "rotary_base": Rotary.of(hf_config).theta}

    def finish(self, chunk: nn.Module, hf_config: Any) -> None:
        set_frequencies(chunk, hf_config)

    def layer_table(self, hf_config: Any, layer: int) -> Table:
        return {**self.attention_table(hf_config), **DENSE_MLP}

    def attention_table(self, hf_config: Any) -> Table:
        """Names of attention and of the norm before it."""
        table: dict[str, Any] = {
            "self_attention.linear_qkv.layer_norm_weight": Whole(("input_layernorm.weight",)),
            "self_attention.linear_qkv.weight": grouped_qkv(hf_config, "weight"),
            "self_attention.linear_proj.weight": Columns(("self_attn.o_proj.weight",)),
        }
        if self.qkv_bias:
            table["self_attention.linear_qkv.bias"] = grouped_qkv(hf_config, "bias")
        if self.qk_norm:
            table["self_attention.q_layernorm.weight"] = Whole(("self_attn.q_norm.weight",))
            table["self_attention.k_layernorm.weight"] = Whole(("self_attn.k_norm.weight",))
        return table

    def check(self, hf_config: Any) -> None:
        """Refuse variants of the architecture that the table would load wrongly."""
        if hf_config.hidden_act != "silu":
            raise ValueError(f"hidden_act={hf_config.hidden_act} is not built on Megatron here (only silu); use fsdp2.")
        for field in ("attention_bias", "mlp_bias"):
            if getattr(hf_config, field, False):
                raise ValueError(f"{field}=True of {hf_config.model_type} is not built on Megatron here; use fsdp2.")
        if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
            raise ValueError(
                f"{hf_config.model_type} has layers with a sliding window, which are not built on Megatron here; use "
                "fsdp2, or +model.override_config.use_sliding_window=False for sequences within the window."
            )


def dense_fields(hf_config: Any) -> dict[str, Any]:
    """Fields of `TransformerConfig` that every family here has."""
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "ffn_hidden_size": hf_config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def model_arguments(hf_config: Any) -> dict[str, Any]:
    """Arguments of `GPTModel` that every family here has."""
    return {
        "vocab_size": hf_config.vocab_size,
        "max_sequence_length": hf_config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": bool(hf_config.tie_word_embeddings),
    }


def head_dim(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def grouped_qkv(hf_config: Any, kind: str) -> GroupedQkv:
    """`kind` is weight or bias."""
    groups, size = hf_config.num_key_value_heads, head_dim(hf_config)
    return GroupedQkv(
        tuple(f"{name}.{kind}" for name in _QKV),
        groups=groups,
        query_rows=hf_config.num_attention_heads // groups * size,
        key_rows=size,
    )


class Qwen2Family(LlamaFamily):
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    qkv_bias: ClassVar[bool] = True


class Qwen3Family(LlamaFamily):
    """A norm on every query and key head."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    qk_norm: ClassVar[bool] = True
