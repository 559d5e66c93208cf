"""Bytes of weights, gradients and optimizer state per device. Formulas and assumptions: docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape


@dataclass(frozen=True)
class StageParameters:
    """Parameters one device holds of one pipeline stage before data-parallel sharding."""

    dense: float
    experts: float
    num_layers: int
    index: int
    holds_head: bool
    largest_layer: float
    # FSDP's root unit: the head, and the embedding when it is the same weight. Otherwise that is a unit of its own.
    root_unit: float
    embedding_unit: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def stage_parameters(shape: ModelShape, layout: RoleLayout) -> list[StageParameters]:
    """Every stage after tensor and expert parallelism; one stage, uncut, for FSDP."""
    held = layout.stages(shape.num_layers)
    last = len(held) - 1
    expert_cut = layout.expert_parallel * layout.expert_tensor_parallel if layout.is_megatron else 1
    stages = []
    for index, layers in enumerate(held):
        ends = (shape.embedding + shape.vision if index == 0 else 0) + (
            shape.head + shape.final_norm if index == last else 0
        )
        if index == last > 0 and shape.tied:
            # The last stage keeps its own copy of a tied embedding to compute logits with.
            ends += shape.embedding
        dense = (ends + sum(shape.layers[i].dense for i in layers)) / layout.tensor_parallel
        experts = sum(shape.layers[i].routed_experts for i in layers) / expert_cut
        largest = max((shape.layers[i].total for i in layers), default=0)
        stages.append(
            StageParameters(
                dense,
                experts,
                len(layers),
                index,
                holds_head=index == last,
                largest_layer=largest,
                root_unit=shape.head + shape.final_norm + (shape.embedding if shape.tied else 0),
                embedding_unit=0 if shape.tied else shape.embedding,
            )
        )
    return stages


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
    """Bytes on one device of one pipeline stage."""

    stage: int
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
    """States of every pipeline stage; `trainable` is the share of parameters with gradients (LoRA: small)."""
    cut = _megatron_states if layout.is_megatron else _sharded_states
    return [cut(stage, layout, precision, trainable) for stage in stage_parameters(shape, layout)]


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


def _sharded_states(stage: StageParameters, layout: RoleLayout, precision: Precision, trainable: float) -> ModelStates:
    held = stage.total / layout.shard_size
    trained = held * trainable
    weights = held * precision.weights
    if layout.shard_size == 1:
        # One process holds the weights that compute beside the masters. Under adapters autocast makes them as it goes.
        copy = 0.0 if precision.gathered == precision.weights else stage.total * precision.gathered
        gathered = copy if 0 < trainable < 1 else 0.0
        weights += copy - gathered
    elif precision.keep_gathered:
        gathered = stage.total * precision.gathered
    else:
        # The unit being computed, the one being fetched, and the root unit, which stays.
        pair = stage.largest_layer + max(stage.largest_layer, stage.embedding_unit)
        gathered = (pair + stage.root_unit) * precision.gathered
    return ModelStates(
        stage=stage.index,
        weights=weights,
        gathered=gathered,
        gradients=trained * precision.gradients,
        optimizer=trained * precision.optimizer,
        holds_head=stage.holds_head,
        largest_unit=max(stage.largest_layer, stage.root_unit, stage.embedding_unit),
    )


def _megatron_states(stage: StageParameters, layout: RoleLayout, precision: Precision, trainable: float) -> ModelStates:
    dense_copies = layout.data_parallel * layout.context_parallel if precision.distributed_optimizer else 1
    expert_copies = layout.expert_data_parallel if precision.distributed_optimizer else 1
    spread = stage.dense / dense_copies + stage.experts / expert_copies
    return ModelStates(
        stage=stage.index,
        weights=stage.total * precision.weights,
        gathered=0.0,
        gradients=stage.total * trainable * precision.gradients,
        optimizer=spread * trainable * precision.optimizer,
        holds_head=stage.holds_head,
        largest_unit=max(stage.largest_layer, stage.root_unit, stage.embedding_unit),
    )
