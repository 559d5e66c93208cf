"""Pipeline stages and model states, computed by hand."""

from __future__ import annotations

import pytest

from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import shape_from_config
from dovetail.config.plan.stages import pipeline_stages, stage_sizes
from dovetail.config.plan.states import Precision, lora_share, model_states
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

FP32 = Precision(weights=4, gathered=2, gradients=4, optimizer=8)


def test_uneven_stages_of_deepseek_v3() -> None:
    assert stage_sizes(61, 16, first=3, last=2) == (3, *[4] * 14, 2)
    with pytest.raises(ValueError, match="61 layers cannot be shared equally by 16"):
        stage_sizes(61, 16)


def test_virtual_chunks_are_dealt_round_robin() -> None:
    assert pipeline_stages(8, 2, virtual=2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    with pytest.raises(ValueError, match="virtual"):
        pipeline_stages(6, 2, virtual=2)


def test_stages_together_hold_the_whole_model() -> None:
    shape = shape_from_config(known.DEEPSEEK_V3)
    layout = RoleLayout(
        "actor", "megatron", "global", 512, 32, pipeline_parallel=16, first_stage_layers=3, last_stage_layers=2
    )
    assert sum(stage.dense + stage.experts for stage in model_states(shape, layout, FP32)) == shape.parameters


def test_full_sharding_divides_states_by_the_world_and_hybrid_by_its_group() -> None:
    shape = shape_from_config(known.QWEN2_5_7B)
    full = RoleLayout("actor", "fsdp2", "global", 16, 16, shard_size=16)
    hybrid = RoleLayout("actor", "fsdp2", "global", 16, 16, shard_size=8, replicas=2)
    [a], [b] = model_states(shape, full, FP32), model_states(shape, hybrid, FP32)
    assert a.weights + a.gradients + a.optimizer == pytest.approx(16 * shape.parameters / 16)
    assert b.weights == pytest.approx(2 * a.weights)


def test_the_distributed_optimizer_spreads_experts_over_expert_replicas_only() -> None:
    shape = shape_from_config(known.DEEPSEEK_V3)
    layout = RoleLayout(
        "actor", "megatron", "global", 512, 32,
        pipeline_parallel=16, expert_parallel=32, first_stage_layers=3, last_stage_layers=2,
    )  # fmt: skip
    precision = Precision(weights=2, gathered=2, gradients=4, optimizer=12, distributed_optimizer=True)
    assert layout.expert_data_parallel == 1
    middle = model_states(shape, layout, precision)[1]
    layer = shape.layers[10]
    experts = 4 * layer.routed_experts / 32
    assert middle.weights == pytest.approx(2 * (4 * layer.dense + experts))
    assert middle.optimizer == pytest.approx(12 * (4 * layer.dense / 32 + experts))


def test_adapters_are_a_small_share_of_the_model() -> None:
    shape = shape_from_config(known.QWEN2_5_7B)
    # peft counts 80,740,352 adapter parameters at rank 32 on all linear layers of Qwen2.5-7B.
    assert lora_share(shape, 32) * shape.parameters == pytest.approx(80_740_352)
