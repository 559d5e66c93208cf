"""Pipeline stages and model states by hand; activations against the tensors that autograd really saves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.config.plan.activations import (
    fused_head_bytes,
    layer_activations,
    logits_bytes,
    training_activations,
)
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import shape_from_config
from dovetail.config.plan.stages import pipeline_stages, stage_sizes
from dovetail.config.plan.states import Precision, lora_share, model_states
from dovetail.models import fused_head
from dovetail.models.head import chunk_rows
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


ALONE = RoleLayout(role="actor", backend="fsdp2", pool="global", world_size=1, data_parallel=1)
NUM_TOKENS = 64


def saved_bytes(config: Any, *, compiled: bool) -> int:
    """Bytes of the distinct storages that autograd keeps for one forward of the decoder, weights not counted."""
    import torch
    from transformers import AutoModelForCausalLM

    from dovetail.models.attention import register_packed_attention

    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=register_packed_attention()
    )
    if compiled:
        for layer in model.model.layers:
            layer.compile(backend=_without_kernels(), dynamic=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The output is held so that no storage is freed and its address used again.
        output = model.model(torch.randint(0, 100, (1, NUM_TOKENS)))
    assert output is not None
    return sum(storage.nbytes() for storage in kept.values())


def _without_kernels() -> Any:
    """The compiler's choice of what backward keeps, as for CUDA, but no kernels: they would need a C++ compiler."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda graph, inputs: graph.forward,
        bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


# One compiled model: tracing costs seconds, and Qwen3's layer has all that the others' have.
@pytest.mark.parametrize(
    ("model_type", "head_dim", "compiled"),
    [("llama", 32, False), ("qwen2", 32, False), ("qwen3", 48, False), ("qwen3", 48, True)],
)
def test_saved_activations_per_layer_match_autograd_within_two_percent(
    model_type: str, head_dim: int, compiled: bool
) -> None:
    from transformers import AutoConfig

    def config_with(layers: int) -> Any:
        extra = {} if model_type == "qwen2" else {"head_dim": head_dim}
        return AutoConfig.for_model(
            model_type,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=200,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **extra,
        )

    # The difference of two depths leaves out what is saved outside the layers.
    measured = saved_bytes(config_with(2), compiled=compiled) - saved_bytes(config_with(1), compiled=compiled)
    shape = shape_from_config(json.loads(json.dumps(config_with(1).to_dict(), default=str)))
    predicted = layer_activations(shape, moe=False, layout=ALONE, compiled=compiled) * NUM_TOKENS
    assert predicted == pytest.approx(measured, rel=0.02)


def test_checkpointing_keeps_one_boundary_per_layer_and_one_whole_layer() -> None:
    shape = shape_from_config(known.QWEN2_5_7B)
    layer, inputs = 1000 * layer_activations(shape, moe=False, layout=ALONE), 1000 * 28 * 2 * 3584
    kept = training_activations(shape, ALONE, 0, 1000, micro_batches=8, checkpointing=True)
    assert kept == pytest.approx(inputs + layer)
    kept = training_activations(shape, ALONE, 0, 1000, micro_batches=8, checkpointing=True, logits=layer / 4)
    assert kept == pytest.approx(inputs + layer * 3 / 4), "logits are freed before the layer is computed again"
    kept = training_activations(shape, ALONE, 0, 1000, micro_batches=8, checkpointing=True, logits=2 * layer)
    assert kept == pytest.approx(inputs)
    everything = training_activations(shape, ALONE, 0, 1000, micro_batches=8, checkpointing=False)
    assert everything == pytest.approx(28 * layer)


def test_an_early_pipeline_stage_keeps_more_micro_batches_in_flight() -> None:
    shape = shape_from_config(known.QWEN2_5_7B)
    layout = RoleLayout("actor", "megatron", "global", 4, data_parallel=1, pipeline_parallel=4)
    first = training_activations(shape, layout, 0, 1000, micro_batches=8, checkpointing=False)
    last = training_activations(shape, layout, 3, 1000, micro_batches=8, checkpointing=False)
    assert first == pytest.approx(4 * last)
    few = training_activations(shape, layout, 0, 1000, micro_batches=2, checkpointing=False)
    assert few == pytest.approx(2 * last)


def test_offloaded_activations_keep_one_boundary_on_the_device() -> None:
    shape = shape_from_config(known.QWEN2_5_7B)
    kept = training_activations(shape, ALONE, 0, 1000, micro_batches=8, checkpointing=True)
    offloaded = training_activations(shape, ALONE, 0, 1000, micro_batches=8, checkpointing=True, offload=True)
    assert kept - offloaded == pytest.approx(1000 * 27 * 2 * 3584)


def test_the_fused_head_holds_two_chunks_and_a_gradient_however_many_tokens() -> None:
    shape = shape_from_config(known.QWEN2_5_7B)
    assert logits_bytes(shape, ALONE, 32768, training=True, entropy=False) == 32768 * 152064 * 14
    assert logits_bytes(shape, ALONE, 32768, training=False, entropy=True) == 32768 * 152064 * 18
    for tokens in (32768, 131072):
        fused = fused_head_bytes(shape, ALONE, tokens, training=True, accelerator=True)
        assert fused == 2 * 1024**3 + 4 * 152064 * 3584


def test_the_head_keeps_a_gradient_where_it_takes_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bytes that the plan counts, whether a chunk of logits or the weight's gradient is larger."""
    for hidden_size in (1024, 3584):
        shape = replace(shape_from_config(known.QWEN2_5_7B), vocab_size=1 << 17, hidden_size=hidden_size)
        takes = fused_head_bytes(shape, ALONE, 20480, training=True, accelerator=True, keeps=True)
        hidden = torch.zeros(1, dtype=torch.bfloat16).expand(20480, hidden_size)
        weight = torch.zeros(1).expand(1 << 17, hidden_size)
        for free, fits in ((2 * takes, True), (2 * takes - 1, False)):
            monkeypatch.setattr(fused_head, "_free_bytes", lambda device, free=free: free)
            assert fused_head.gradient_fits(hidden, weight, chunk_rows(1 << 17, torch.device("cuda"))) == fits
