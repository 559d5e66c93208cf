"""The layers of a dense model for small batches, where beginning and ending kernels takes as long as reading weights.

Reads the model's own weights, as they are; see `kernels.small_batch` for how a layer is cut into launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from dovetail.rollout.native.cuda.kernels.ops import Ops
from dovetail.rollout.native.cuda.paged_step import PagedStep

# Rotary frequencies of these types depend on the longest position of a step.
_MOVING_ROPE = frozenset({"dynamic", "longrope"})


def has_moving_rope(model: PreTrainedModel) -> bool:
    rope: Any = getattr(model.config, "rope_parameters", None) or {}
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each kind of layer
    return any(part.get("rope_type") in _MOVING_ROPE for part in ropes)


class SmallBatch:
    """`hidden` is what `FusedDecoder` computes, for few rows and a step with `locks`."""

    def __init__(self, model: PreTrainedModel, ops: Ops, windows: Sequence[int | None]) -> None:
        self._ops = ops
        self._windows = windows
        self._base: Any = model.base_model
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def supports(model: PreTrainedModel, ops: Ops) -> bool:
        """bfloat16, no experts, no norms of heads, biases at the attention's inputs or none, a fixed rotary."""
        kernels = ops.small_batch
        if kernels is None or model.dtype not in kernels.DTYPES or not kernels.runs_on(model.device):
            return False
        base: Any = model.base_model
        plain = type(base.embed_tokens) is torch.nn.Embedding and kernels.fits(base.embed_tokens.embedding_dim)
        return plain and not has_moving_rope(model) and all(_layer_fits(layer, kernels) for layer in base.layers)

    def takes(self, num_rows: int, step: PagedStep) -> bool:
        return num_rows <= self._ops.small_batch.MAX_ROWS and step.locks is not None

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """The normed state after the last layer."""
        kernels, layers, norm = self._ops.small_batch, self._base.layers, self._base.norm
        assert step.locks is not None, "`takes` has seen them"
        norms = [*(layer.input_layernorm for layer in layers), norm]
        residual, scaled = kernels.embed(tokens, self._base.embed_tokens.weight, norms[0].weight)
        rotation = self._rotation_of(step.max_length, residual)
        for index, layer in enumerate(layers):
            attention, mlp = layer.self_attn, layer.mlp
            inputs = _attention_inputs(layer)
            between = layer.post_attention_layernorm
            query = kernels.norm_qkv(
                scaled,
                norms[index].variance_epsilon,
                [linear.weight for linear in inputs],
                [linear.bias for linear in inputs],
                rotation,
                positions,
                step.pool.keys[index],
                step.pool.values[index],
                step.targets,
            )
            attended = step.attention(index, query, attention.scaling, self._windows[index])
            scaled = kernels.linear_add(attended, attention.o_proj.weight, residual, between.weight, step.locks)
            activated = kernels.norm_gated(scaled, between.variance_epsilon, mlp.gate_proj.weight, mlp.up_proj.weight)
            scaled = kernels.linear_add(activated, mlp.down_proj.weight, residual, norms[index + 1].weight, step.locks)
        return self._ops.rms_norm(residual, norm.weight, norm.variance_epsilon)

    def _rotation_of(self, max_length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of all positions, as the model's own module rounds them."""
        if self._rotation is None or self._rotation[0].shape[0] < max_length:
            positions = torch.arange(max_length, device=like.device)
            cosine, sine = self._base.rotary_emb(like[None], positions[None])
            self._rotation = (cosine[0].contiguous(), sine[0].contiguous())
        return self._rotation


def _attention_inputs(layer: Any) -> tuple[Any, Any, Any]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def _layer_fits(layer: Any, kernels: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if not hasattr(mlp, "gate_proj") or hasattr(attention, "q_norm"):
        return False
    outer = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    query, key, value = inputs = _attention_inputs(layer)
    return (
        all(type(linear) is torch.nn.Linear for linear in (*inputs, *outer))
        and all(linear.bias is None for linear in outer)
        and len({linear.bias is None for linear in inputs}) == 1
        and key.out_features == value.out_features
        and kernels.head_fits(attention.head_dim)
        and kernels.fits(query.in_features, mlp.gate_proj.out_features)
        and kernels.fits(attention.o_proj.in_features, attention.o_proj.out_features)
        and kernels.fits(mlp.down_proj.in_features, mlp.down_proj.out_features)
    )
