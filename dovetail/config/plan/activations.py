"""Bytes of activations and logits per device. The formulas and their assumptions are in docs/plan.md."""

from __future__ import annotations

from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape

BF16 = 2
FP32 = 4
# One chunk of fp32 logits of the fused head, by kind of device.
FUSED_CHUNK_ACCELERATOR = 1 << 30
FUSED_CHUNK_CPU = 1 << 27


def layer_activations(shape: ModelShape, *, moe: bool, layout: RoleLayout, compiled: bool = False) -> float:
    """Bytes that backward keeps of one token in one layer.

    A compiled layer computes element-wise work again instead of keeping it; experts are counted as if not compiled.
    """
    # Per norm its input and the input of the next product; not compiled, that input in fp32 and the normalised value.
    norm = 2 * BF16 if compiled else FP32 + 2 * BF16
    norms = 2 * norm * shape.hidden_size
    # A norm on queries and keys is followed by no product: what it gives is rotated at once.
    attention = BF16 * shape.attention_width + (norm - BF16) * shape.qk_norm_width
    tensors = 4 if shape.gated_mlp else 2
    if moe:
        routed = shape.experts_per_token * (
            tensors * BF16 * shape.expert_intermediate_size + 2 * BF16 * shape.hidden_size
        )
        mlp = routed / layout.expert_tensor_parallel
        mlp += tensors * BF16 * shape.shared_intermediate_size / layout.tensor_parallel
    else:
        # The activation of the gate is the one that is computed again.
        kept = tensors - 1 if compiled and shape.gated_mlp else tensors
        mlp = kept * BF16 * shape.intermediate_size / layout.tensor_parallel
    # Megatron's sequence parallelism cuts the norms by the tensor-parallel size too.
    return (norms + attention) / layout.tensor_parallel + mlp


def training_activations(
    shape: ModelShape,
    layout: RoleLayout,
    stage: int,
    tokens: float,
    *,
    micro_batches: int,
    checkpointing: bool,
    offload: bool = False,
    compiled: bool = False,
    logits: float = 0.0,
) -> float:
    """Bytes for backward on one device of `stage`, with `tokens` of one micro-batch on that device.

    With gradient checkpointing: the layers' inputs, and the widest layer while it is computed again. Backward frees the
    `logits` before that, so the smaller of the two hides behind the larger.
    """
    layers = layout.stages(shape.num_layers)[stage]
    each = [layer_activations(shape, moe=shape.layers[i].is_moe, layout=layout, compiled=compiled) for i in layers]
    # One-forward-one-backward: an early stage has a micro-batch in flight for each stage after it.
    in_flight = min(layout.pipeline_parallel - stage, micro_batches)
    if not checkpointing:
        return tokens * in_flight * sum(each)
    # Offloaded inputs wait on the host; one is back while its layer is recomputed.
    num_inputs = min(1, len(each)) if offload else in_flight * len(each)
    inputs = tokens * num_inputs * BF16 * shape.hidden_size / layout.tensor_parallel
    return inputs + max(0.0, tokens * max(each, default=0.0) - logits)


def forward_activations(shape: ModelShape, layout: RoleLayout, tokens: float) -> float:
    """Bytes alive at the widest point of a forward pass without gradients: about one layer."""
    kinds = {shape.is_moe, False}
    return tokens * max(layer_activations(shape, moe=moe, layout=layout) for moe in kinds)


def logits_bytes(shape: ModelShape, layout: RoleLayout, tokens: float, *, training: bool, entropy: bool) -> float:
    """Bytes at the peak of the plain head: all logits and what is computed from them."""
    # Logits in bf16, and in fp32 the scaled logits and their log-softmax; training adds the gradient of the latter.
    per_value = BF16 + 2 * FP32 + (FP32 if training else 0)
    # The entropy multiplies probabilities with log-probabilities: two more fp32 tensors.
    per_value += 2 * FP32 if entropy else 0
    return tokens * shape.vocab_size * per_value / layout.tensor_parallel


def fused_head_bytes(
    shape: ModelShape, layout: RoleLayout, tokens: float, *, training: bool, accelerator: bool, keeps: bool = False
) -> float:
    """Bytes at the peak of the fused head: one chunk of logits, its working copy, and the weight's fp32 gradient.

    One that `keeps` the gradient of all logits has a chunk beside it in forward, the weight's gradient in backward.
    """
    chunk = FUSED_CHUNK_ACCELERATOR if accelerator else FUSED_CHUNK_CPU
    logits = min(chunk, tokens * shape.vocab_size * FP32 / layout.tensor_parallel)
    gradient = shape.vocab_size * shape.hidden_size * FP32 / layout.tensor_parallel if training else 0.0
    kept = BF16 * tokens * shape.vocab_size if keeps else 0.0
    return max(2 * logits + gradient, kept + max(logits, gradient))
