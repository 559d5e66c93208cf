"""The layers that `dovetail check` gives each stage are those that Megatron builds there."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.config.plan.stages import pipeline_stages

pytestmark = pytest.mark.distributed

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, HEAD = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "options"),
    [
        (8, 4, 1, {}),
        (8, 2, 2, {}),
        (61, 16, 1, {FIRST: 3, LAST: 2}),
        (9, 4, 1, {LAST: 3}),
        (12, 3, 2, {FIRST: 2, LAST: 4}),
        (6, 4, 1, {EMBEDDING: True, HEAD: True}),
        (7, 2, 2, {HEAD: True}),
        (14, 4, 2, {EMBEDDING: True, HEAD: True}),
    ],
)
def test_the_plan_shares_layers_as_megatron_does(
    layers: int, pipeline: int, virtual: int, options: dict[str, Any]
) -> None:
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32,
        **options,
    )
    built: list[tuple[int, ...]] = []
    for stage in range(pipeline):
        held: list[int] = []
        for chunk in range(virtual):
            vp_stage = chunk if virtual > 1 else None
            start = get_transformer_layer_offset(config, vp_stage, stage)
            held.extend(range(start, start + get_num_layers_to_build(config, vp_stage, stage)))
        built.append(tuple(held))
    planned = pipeline_stages(
        layers,
        pipeline,
        virtual=virtual,
        first=options.get(FIRST),
        last=options.get(LAST),
        count_embedding=options.get(EMBEDDING, False),
        count_head=options.get(HEAD, False),
    )
    assert planned == tuple(built)
