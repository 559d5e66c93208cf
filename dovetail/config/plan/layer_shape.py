"""Parameters of one decoder layer: attention (grouped or latent), MLP, experts. Counts only; reads no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.config.plan.families import Family, Switch

Raw = dict[str, Any]


class ModelShapeError(ValueError):
    """A `config.json` that is missing, unreadable, or lacks a size that nothing can be counted without."""


@dataclass(frozen=True)
class LayerShape:
    """Parameters of one decoder layer, by part."""

    attention: int
    norms: int
    mlp: int = 0
    router: int = 0
    shared_experts: int = 0
    routed_experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.routed_experts

    @property
    def dense(self) -> int:
        """All but the routed experts: what expert parallelism does not split."""
        return self.attention + self.norms + self.mlp + self.router + self.shared_experts

    @property
    def is_moe(self) -> bool:
        return self.routed_experts > 0


@dataclass(frozen=True)
class Experts:
    """The mixture a config describes, under the several names that model families give its sizes."""

    count: int
    per_token: int
    width: int
    shared_width: int
    first_dense: int
    every: int
    dense_layers: frozenset[int]

    @classmethod
    def of(cls, text: Raw) -> Experts:
        count = int(text.get("n_routed_experts") or text.get("num_experts") or text.get("num_local_experts") or 0)
        width = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0) if count else 0
        shared = int(text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * width)
        return cls(
            count=count,
            per_token=int(text.get("num_experts_per_tok") or text.get("experts_per_token") or 1) if count else 0,
            width=width,
            shared_width=shared if count else 0,
            first_dense=int(text.get("first_k_dense_replace") or 0),
            every=int(text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1),
            dense_layers=frozenset(text.get("mlp_only_layers") or ()),
        )

    def in_layer(self, index: int) -> bool:
        if not self.count or index < self.first_dense or index in self.dense_layers:
            return False
        return (index + 1) % self.every == 0


def count_layer(
    text: Raw, family: Family, index: int, hidden: int, heads: int, kv_heads: int, head_dim: int, experts: Experts
) -> LayerShape:
    """Parameters of layer `index`, dense or mixture as the config says."""
    if is_latent(text, family):
        attention, qk_norms = _latent_attention(text, family, hidden, heads)
    else:
        attention, qk_norms = _grouped_attention(text, family, hidden, heads, kv_heads, head_dim)
    norms = family.norms_per_layer * hidden * (2 if family.norm_bias else 1) + qk_norms
    if not experts.in_layer(index):
        bias = _on(family.mlp_bias, text)
        return LayerShape(attention, norms, mlp=_mlp(hidden, dense_width(text, experts), family.gated_mlp, bias))
    gate = hidden if family.shared_expert_gate else 0
    return LayerShape(
        attention,
        norms,
        router=experts.count * (hidden + (1 if family.router_bias else 0)),
        shared_experts=_mlp(hidden, experts.shared_width, True, False) + gate if experts.shared_width else 0,
        routed_experts=experts.count * _mlp(hidden, experts.width, True, family.expert_bias),
    )


def size_of(config: Raw, *names: str) -> int:
    """The first of `names` that the config states; sizes nothing can be counted without."""
    for name in names:
        if config.get(name):
            return int(config[name])
    raise ModelShapeError(f"config.json has no {names[0]}; it does not describe a decoder-only language model.")


def _on(switch: Switch, config: Raw) -> bool:
    return switch if isinstance(switch, bool) else bool(config.get(switch[0], switch[1]))


def _grouped_attention(
    text: Raw, family: Family, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[int, int]:
    q, kv = heads * head_dim, kv_heads * head_dim
    weights = hidden * (q + 2 * kv) + q * hidden
    weights += (q + 2 * kv) if _on(family.qkv_bias, text) else 0
    weights += hidden if _on(family.out_bias, text) else 0
    weights += heads if family.attention_sinks else 0
    if family.qk_norm == "none" or (family.qk_norm_key and not text.get(family.qk_norm_key, False)):
        return weights, 0
    return weights, 2 * head_dim if family.qk_norm == "head" else q + kv


def _latent_attention(text: Raw, family: Family, hidden: int, heads: int) -> tuple[int, int]:
    nope, rope = size_of(text, "qk_nope_head_dim"), size_of(text, "qk_rope_head_dim")
    value, kv_rank = size_of(text, "v_head_dim"), size_of(text, "kv_lora_rank")
    q_rank = text.get("q_lora_rank")
    query = heads * (nope + rope)
    weights = hidden * q_rank + q_rank * query if q_rank else hidden * query
    weights += hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
    if _on(family.qkv_bias, text):
        weights += (q_rank or 0) + kv_rank + rope + hidden
    return weights, (q_rank or 0) + kv_rank


def is_latent(text: Raw, family: Family) -> bool:
    """Whether attention compresses keys and values (DeepSeek's MLA)."""
    return family.latent_attention or "kv_lora_rank" in text


def attention_width(text: Raw, family: Family, heads: int, kv_heads: int, head_dim: int) -> int:
    """Two-byte values per token that the backward pass of attention keeps: queries, keys, values, output."""
    if not is_latent(text, family):
        return 2 * (heads + kv_heads) * head_dim
    query = heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    ranks = (text.get("q_lora_rank") or 0) + text["kv_lora_rank"]
    return 2 * query + 2 * heads * text["v_head_dim"] + ranks


def qk_norm_width(text: Raw, family: Family, heads: int, kv_heads: int, head_dim: int) -> int:
    """Values per token of queries and keys where a norm is on them; latent attention's are counted with its ranks."""
    if is_latent(text, family) or family.qk_norm == "none":
        return 0
    return (heads + kv_heads) * head_dim


def dense_width(text: Raw, experts: Experts) -> int:
    """Inner width of the dense MLP."""
    width = text.get("intermediate_size") or text.get("n_inner") or text.get("ffn_dim")
    return int(width or experts.width or 4 * size_of(text, "hidden_size", "n_embd", "d_model"))


def _mlp(hidden: int, width: int, gated: bool, bias: bool) -> int:
    ups = 2 if gated else 1
    return (ups + 1) * hidden * width + ((ups * width + hidden) if bias else 0)
