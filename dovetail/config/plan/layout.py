"""The parallel sizes of one role, and how they cut a model. Plain numbers; built from a config in `placement.py`."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.plan.stages import pipeline_stages


@dataclass(frozen=True)
class RoleLayout:
    """Where a role runs and how its model is split there."""

    role: str
    backend: str
    pool: str
    world_size: int
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    # Ulysses: ranks that share one sequence, outside Megatron.
    sequence_parallel: int = 1
    # FSDP: ranks over which one copy of the weights is cut, and copies.
    shard_size: int = 1
    replicas: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    # Megatron's account_for_*_in_pipeline_split: embedding and head take the place of a layer.
    embedding_counts: bool = False
    head_counts: bool = False
    # Rollout only: independent engines.
    num_engines: int | None = None

    @property
    def is_megatron(self) -> bool:
        return self.backend == "megatron"

    @property
    def expert_data_parallel(self) -> int:
        """Copies of each expert: what distributed optimizers can spread its states over."""
        per_copy = self.pipeline_parallel * self.expert_parallel * self.expert_tensor_parallel
        return max(1, self.world_size // per_copy)

    @property
    def ranks_per_sequence(self) -> int:
        return self.sequence_parallel * self.context_parallel

    def stages(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        return pipeline_stages(
            num_layers,
            self.pipeline_parallel,
            virtual=self.virtual_pipeline,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
            count_embedding=self.embedding_counts,
            count_head=self.head_counts,
        )

    def experts_per_rank(self, shape: ModelShape) -> int:
        """Routed experts of each layer that a device holds, whole or its part of them."""
        return shape.num_experts // self.expert_parallel if shape.is_moe else 0


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
