"""Bytes of weights, gradients and optimizer state per device. Formulas and assumptions: docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each kind of state."""

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    # Megatron: the fp32 master copy and moments are spread over data-parallel ranks, weights and gradients are not.
    distributed_optimizer: bool = False
    # FSDP2 with reshard_after_forward off keeps every gathered layer.
    keep_gathered: bool = False


@dataclass(frozen=True)
class ModelStates:
    """One device of one pipeline stage: its parameters before data-parallel sharding, and bytes of its states."""

    stage: int
    dense: float
    experts: float
    weights: float
    gathered: float
    gradients: float
    optimizer: float
    holds_head: bool
    # Parameters of the largest unit that is gathered or reduced as one.
    largest_unit: float


def model_states(
    shape: ModelShape, layout: RoleLayout, precision: Precision, *, trainable: float = 1.0
) -> list[ModelStates]:
    """States of every pipeline stage (one for FSDP); `trainable` is the share of parameters with gradients (LoRA)."""
    held = layout.stages(shape.num_layers)
    last = len(held) - 1
    expert_cut = layout.expert_parallel * layout.expert_tensor_parallel if layout.is_megatron else 1
    # FSDP's root unit: the head, and the embedding when it is the same weight. Otherwise that is a unit of its own.
    root = shape.head + shape.final_norm + (shape.embedding if shape.tied else 0)
    embedding = 0 if shape.tied else shape.embedding
    states = []
    for index, layers in enumerate(held):
        ends = shape.embedding + shape.vision if index == 0 else 0
        ends += shape.head + shape.final_norm if index == last else 0
        # The last stage keeps its own copy of a tied embedding to compute logits with.
        ends += shape.embedding if index == last > 0 and shape.tied else 0
        dense = (ends + sum(shape.layers[i].dense for i in layers)) / layout.tensor_parallel
        experts = sum(shape.layers[i].routed_experts for i in layers) / expert_cut
        total, largest = dense + experts, max((shape.layers[i].total for i in layers), default=0)
        gathered, copy, trained = 0.0, 0.0, total / layout.shard_size * trainable
        spread = trained
        if layout.is_megatron:
            if precision.distributed_optimizer:
                spread = dense / (layout.data_parallel * layout.context_parallel)
                spread = (spread + experts / layout.expert_data_parallel) * trainable
        elif layout.shard_size == 1:
            # One process holds the weights that compute beside the masters. Adapters: autocast makes them as it goes.
            copy = 0.0 if precision.gathered == precision.weights else total * precision.gathered
            gathered, copy = (copy, 0.0) if 0 < trainable < 1 else (0.0, copy)
        elif precision.keep_gathered:
            gathered = total * precision.gathered
        else:
            # The unit being computed, the one being fetched, and the root unit, which stays.
            gathered = (largest + max(largest, embedding) + root) * precision.gathered
        states.append(
            ModelStates(
                index,
                dense,
                experts,
                weights=total / layout.shard_size * precision.weights + copy,
                gathered=gathered,
                gradients=trained * precision.gradients,
                optimizer=spread * precision.optimizer,
                holds_head=index == last,
                largest_unit=max(largest, root, embedding),
            )
        )
    return states


def lora_share(shape: ModelShape, rank: int) -> float:
    """Adapters of `rank` on every linear layer as a share of the parameters: rank * (in + out) per matrix."""
    hidden, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * (hidden + query) + 2 * (hidden + key)
    adapters = 0
    for layer in shape.layers:
        if layer.is_moe:
            mlp = 3 * shape.num_experts * (hidden + shape.expert_intermediate_size)
        else:
            mlp = 3 * (hidden + shape.intermediate_size)
        adapters += rank * (attention + mlp)
    return min(1.0, adapters / shape.parameters)
