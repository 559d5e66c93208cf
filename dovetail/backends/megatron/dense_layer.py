"""A dense decoder layer for packed rows on one device, in a form that compiles: all but attention is two functions of
tensors. Weights, their names and checkpoints are those of Megatron's layer.

Megatron's own `forward` cannot be compiled whole: rotary embeddings read the sequence lengths on the host in every
layer, and its linear layers are autograd functions that talk to other ranks. So a model is built of these layers only
where `layers_compile` says so; every other one keeps Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from dovetail.backends.megatron.no_te import has_transformer_engine
from dovetail.backends.megatron.torch_layers import rms_norm_of_ops
from dovetail.config.megatron import MegatronConfig


def layers_compile(config: MegatronConfig, mcore: Any) -> bool:
    """Whether the layers of a model are of the kind here. Transformer Engine has fused kernels of its own."""
    dense = mcore.num_moe_experts is None and not mcore.multi_latent_attention
    return config.has_plain_layers and dense and not has_transformer_engine()


class DenseLayer(TransformerLayer):
    """Norm, attention, norm, SwiGLU. `rotary_pos_emb` is what `rotary_table` gives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        attention = self.self_attention
        self._head_size: int = attention.hidden_size_per_attention_head
        self._num_groups: int = attention.num_query_groups_per_partition
        self._queries_per_group: int = attention.num_attention_heads_per_partition // self._num_groups
        self._norms_heads: bool = self.config.qk_layernorm
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = self.before_attention
        self._after: Callable[..., Tensor] = self.after_attention

    def compile_regions(self, **options: Any) -> None:
        """Compile what is before and after attention. Layers share the programs because they run the same code; token
        counts differ between micro-batches, so shapes are dynamic from the start."""
        self._before = torch.compile(self.before_attention, dynamic=True, **options)
        self._after = torch.compile(self.after_attention, dynamic=True, **options)

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """`[t, 1, H]` to the same. Masks and contexts of other kinds of layers are None here."""
        query, key, value = self._before(hidden_states, rotary_pos_emb)
        attended = self.self_attention.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        return self._after(hidden_states, attended), None

    def before_attention(self, hidden: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[t, 1, H]` to queries, keys and values `[t, heads, d]`. A group's rows lie side by side."""
        attention = self.self_attention
        linear = attention.linear_qkv
        normed = rms_norm_of_ops(hidden, linear.layer_norm_weight, linear.eps)
        mixed = F.linear(normed, linear.weight, linear.bias)
        mixed = mixed.view(-1, self._num_groups, self._queries_per_group + 2, self._head_size)
        query, key, value = mixed.split([self._queries_per_group, 1, 1], 2)
        query, key, value = query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2)
        if self._norms_heads:
            query = rms_norm_of_ops(query, attention.q_layernorm.weight, attention.q_layernorm.eps)
            key = rms_norm_of_ops(key, attention.k_layernorm.weight, attention.k_layernorm.eps)
        return _rotate(query, rotary), _rotate(key, rotary), value.contiguous()

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`[t, 1, H]` and `[t, heads * d]` to `[t, 1, H]`."""
        hidden = hidden + F.linear(attended.unsqueeze(1), self.self_attention.linear_proj.weight)
        linear = self.mlp.linear_fc1
        normed = rms_norm_of_ops(hidden, linear.layer_norm_weight, linear.eps)
        gate, up = F.linear(normed, linear.weight).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.mlp.linear_fc2.weight)


def rotary_table(frequencies: Tensor, positions: Tensor, mcore: Any) -> Tensor:
    """`[2, t, 1, d]`: cosines and sines of the row's tokens, once for all layers. `frequencies` is Megatron's
    `[longest, 1, 1, d]`, `positions` `[1, t]`."""
    scale = _yarn_get_concentration_factor_from_config(mcore)
    angles = frequencies.flatten(1, 2)
    both = torch.stack([torch.cos(angles) * scale, torch.sin(angles) * scale]).to(mcore.params_dtype)
    return both[:, positions.squeeze(0)]


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rotary[0] + torch.cat((-second, first), -1) * rotary[1]
