"""Bytes of activations and logits per device. The formulas and their assumptions are in docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape

BF16 = 2
# Rows of the vocabulary matrix product that a fused head holds at a time.
FUSED_HEAD_TOKENS = 1024


@dataclass(frozen=True)
class LayerActivations:
    """Bytes one token needs in one layer."""

    saved: float
    boundary: float


def layer_activations(shape: ModelShape, *, moe: bool, layout: RoleLayout) -> LayerActivations:
    """What backward keeps for one token: everything, and the layer's input alone (gradient checkpointing)."""
    # Per norm: its input in fp32 (4), the normalised value (2) and the input of the next product (2).
    norms = 16 * shape.hidden_size
    attention = BF16 * shape.attention_width
    tensors = 4 if shape.gated_mlp else 2
    if moe:
        routed = shape.experts_per_token * (
            tensors * BF16 * shape.expert_intermediate_size + 2 * BF16 * shape.hidden_size
        )
        mlp = routed / layout.expert_tensor_parallel
        mlp += tensors * BF16 * shape.shared_intermediate_size / layout.tensor_parallel
    else:
        mlp = tensors * BF16 * shape.intermediate_size / layout.tensor_parallel
    # Megatron's sequence parallelism cuts the norms by the tensor-parallel size too.
    saved = (norms + attention) / layout.tensor_parallel + mlp
    return LayerActivations(saved=saved, boundary=BF16 * shape.hidden_size / layout.tensor_parallel)


def training_activations(
    shape: ModelShape, layout: RoleLayout, stage: int, tokens: float, *, checkpointing: bool
) -> float:
    """Bytes kept for backward on one device of `stage`, with `tokens` of one micro-batch on that device."""
    layers = layout.stages(shape.num_layers)[stage]
    kinds = [layer_activations(shape, moe=shape.layers[i].is_moe, layout=layout) for i in layers]
    if not kinds:
        return 0.0
    # One-forward-one-backward: an early stage has a micro-batch in flight for each stage after it.
    in_flight = layout.pipeline_parallel - stage
    widest = max(kind.saved for kind in kinds)
    if checkpointing:
        return tokens * (in_flight * sum(kind.boundary for kind in kinds) + widest)
    return tokens * in_flight * sum(kind.saved for kind in kinds)


def forward_activations(shape: ModelShape, layout: RoleLayout, tokens: float) -> float:
    """Bytes alive at the widest point of a forward pass without gradients: about one layer."""
    moe = shape.is_moe
    kinds = [layer_activations(shape, moe=moe, layout=layout)]
    if moe:
        kinds.append(layer_activations(shape, moe=False, layout=layout))
    return tokens * max(kind.saved for kind in kinds)


def logits_bytes(shape: ModelShape, layout: RoleLayout, tokens: float, *, training: bool, fused: bool) -> float:
    """Bytes of logits and what is computed from them, on a device that holds the head."""
    # Training: logits in bf16 (2), in fp32 (4), and the gradient of each (2 + 4); without gradients: 2 + 4.
    per_value = 12 if training else 6
    rows = min(tokens, FUSED_HEAD_TOKENS) if fused else tokens
    return rows * shape.vocab_size * per_value / layout.tensor_parallel
