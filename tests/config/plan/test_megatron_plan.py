"""What `dovetail check` says of Megatron layouts: layers of each stage, memory of each device, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.check import Checked
from dovetail.cli.show_plan import show
from dovetail.config import load_config
from dovetail.config.checks import check_config
from dovetail.config.plan import Plan, make_plan, shape_from_config
from dovetail.config.plan.stages import pipeline_stages
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

GIB = 1024**3
LIST_671B = Path(__file__).parents[1] / "compat" / "test_dapo_dspk_671b_megatron_96gb.txt"
A = "actor_rollout_ref.actor"
MEGATRON = f"{A}.megatron"
OVERRIDE = f"+{MEGATRON}.override_transformer_config"
BASE = ("data.train_files=a.parquet", "algorithm.adv_estimator=grpo", f"{A}.strategy=megatron", "trainer.nnodes=2")


def plan_of(*overrides: str, model: dict[str, Any] = known.QWEN2_5_7B) -> Plan:
    config = load_config(overrides=[*BASE, *overrides]).config
    return make_plan(config, shape_from_config(model))


def errors_of(*overrides: str, model: dict[str, Any] = known.QWEN2_5_7B) -> list[str]:
    config = load_config(overrides=[*BASE, *overrides]).config
    return [str(f) for f in check_config(config, shape_from_config(model)) if f.severity == "error"]


def test_the_671b_script_resolves_to_memory_for_each_of_512_devices(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(overrides_files=[LIST_671B]).config
    shape = shape_from_config(known.DEEPSEEK_V3)
    assert [f for f in check_config(config, shape) if f.severity == "error"] == []
    plan = make_plan(config, shape, device_memory_gib=96)
    assert plan.memory is not None
    assert (plan.layouts[0].world_size, plan.memory.fits) == (512, True)
    stages = plan.memory.stages
    assert [len(stage.layers) for stage in stages] == [3, *[4] * 14, 2]
    assert [stage.layers[0] for stage in stages[:3]] == [0, 3, 7]
    # 256 experts over 32 ranks, in every layer but the three dense ones of the first stage.
    assert {stage.experts_per_device for stage in stages} == {8}
    assert [stage.expert_layers for stage in stages] == [0, *[4] * 14, 2]
    middle, layer = stages[5], shape.layers[30]
    parameters = 4 * layer.dense + 4 * layer.routed_experts / 32
    assert middle.dense_parameters + middle.expert_parameters == pytest.approx(parameters)
    # bf16 weights, fp32 gradients; fp32 master and two moments: dense over 32 copies, experts have one.
    assert middle.items["weights"] == pytest.approx(2 * parameters)
    assert middle.items["gradients"] == pytest.approx(4 * parameters)
    assert middle.items["optimizer"] == pytest.approx(12 * (4 * layer.dense / 32 + 4 * layer.routed_experts / 32))
    assert all(20 * GIB < stage.total < 96 * GIB for stage in stages)
    held = sum(stage.dense_parameters + 32 * stage.expert_parameters for stage in stages)
    assert held == pytest.approx(shape.parameters)
    show(Checked(plan))
    table = capsys.readouterr().out.split("Pipeline stages of the actor")[1]
    assert "1-8" in table
    assert "59-60" in table


def test_the_stage_table_is_in_the_json_form_too() -> None:
    written = plan_of(f"{MEGATRON}.pipeline_model_parallel_size=2").to_dict()["memory"]["stages"]
    assert [stage["layers"] for stage in written] == [tuple(range(14)), tuple(range(14, 28))]
    assert all(stage["total"] > 0 for stage in written)


def test_ends_that_count_as_layers_leave_their_stages_one_layer_less() -> None:
    assert pipeline_stages(6, 4, count_embedding=True, count_head=True) == ((0,), (1, 2), (3, 4), (5,))
    assert pipeline_stages(7, 4, count_embedding=True) == ((0,), (1, 2), (3, 4), (5, 6))
    assert pipeline_stages(6, 2, virtual=2, count_embedding=True, count_head=True) == ((0, 3, 4), (1, 2, 5))
    with pytest.raises(ValueError, match="8 layers and 1 end that count as one cannot"):
        pipeline_stages(8, 4, count_head=True)
    with pytest.raises(ValueError, match="cannot be combined"):
        pipeline_stages(8, 4, first=2, count_head=True)


def test_ends_are_counted_when_the_config_says_so() -> None:
    switches = [f"{OVERRIDE}.account_for_{end}_in_pipeline_split=True" for end in ("embedding", "loss")]
    plan = plan_of(f"{MEGATRON}.pipeline_model_parallel_size=2", *switches)
    assert plan.memory is not None
    assert [len(stage.layers) for stage in plan.memory.stages] == [14, 14]
    # 28 layers and 2 ends are 30 places: 15 for each stage, of which one is no layer.
    assert errors_of(f"{MEGATRON}.pipeline_model_parallel_size=4", *switches) != []


def test_recompute_of_megatron_goes_before_the_models_switch() -> None:
    whole = plan_of(f"{OVERRIDE}.recompute_granularity=selective")
    again = plan_of(
        f"{OVERRIDE}.recompute_granularity=full", "actor_rollout_ref.model.enable_gradient_checkpointing=False"
    )
    assert whole.memory is not None
    assert again.memory is not None
    assert whole.memory.stages[0].items["activations"] > 5 * again.memory.stages[0].items["activations"]


def test_layers_keep_less_where_they_are_compiled_which_shared_layers_are_not() -> None:
    def activations(*overrides: str) -> float:
        plan = plan_of("trainer.device=cuda", "actor_rollout_ref.model.enable_gradient_checkpointing=False", *overrides)
        assert plan.memory is not None
        return plan.memory.stages[0].items["activations"]

    off, shared = f"{A}.use_torch_compile=False", f"{MEGATRON}.tensor_model_parallel_size=2"
    assert activations() < 0.8 * activations(off)
    assert activations(shared) == activations(shared, off)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((f"{MEGATRON}.tensor_model_parallel_size=3",), ("TP 3", "does not divide the 16 devices")),
        ((f"{OVERRIDE}.num_layers_in_first_pipeline_stage=0", f"{MEGATRON}.pipeline_model_parallel_size=2"),
         ("0 layers", "at least one")),
        ((f"{OVERRIDE}.num_layers_in_first_pipeline_stage=5", f"{MEGATRON}.pipeline_model_parallel_size=4"),
         ("23 layers cannot be shared equally by 3 pipeline stages",)),
        ((f"{OVERRIDE}.num_layers_in_first_pipeline_stage=5", f"{OVERRIDE}.account_for_loss_in_pipeline_split=True",
          f"{MEGATRON}.pipeline_model_parallel_size=4"), ("cannot be combined",)),
        ((f"{OVERRIDE}.pipeline_model_parallel_layout='Et|tL'",), ("pipeline_model_parallel_layout is not planned",)),
        ((f"{MEGATRON}.expert_model_parallel_size=4",), ("has no experts",)),
        (("algorithm.adv_estimator=gae", f"{MEGATRON}.tensor_model_parallel_size=2",
          "critic.megatron.tensor_model_parallel_size=4"), ("critic.megatron.tensor_model_parallel_size=4", "use 2")),
        ((f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.virtual_pipeline_model_parallel_size=4"),
         ("14 layers, which 4 virtual chunks",)),
    ],
)  # fmt: skip
def test_layouts_that_cannot_run_are_refused_with_the_reason(changes: tuple[str, ...], words: tuple[str, ...]) -> None:
    found = errors_of(*changes)
    assert any(all(word in line for word in words) for line in found), found


def test_layers_that_stages_cannot_share_get_a_split_that_works() -> None:
    sizes = f"{MEGATRON}.pipeline_model_parallel_size=16"
    (message,) = [line for line in errors_of(sizes, model=known.DEEPSEEK_V3) if "61 layers" in line]
    shares = [f"{OVERRIDE}.num_layers_in_{end}_pipeline_stage={layers}" for end, layers in (("first", 3), ("last", 2))]
    assert "61 layers cannot be shared equally by 16 pipeline stages; give the end stages" in message
    assert " ".join(shares) in message
    assert not [line for line in errors_of(sizes, *shares, model=known.DEEPSEEK_V3) if "layers" in line]
    (message,) = [line for line in errors_of(sizes) if "28 layers" in line]
    assert message.endswith("28 layers cannot be shared equally by 16 pipeline stages; use 4.")


def test_widths_that_tensor_parallel_ranks_cannot_share_are_refused() -> None:
    four = f"{MEGATRON}.tensor_model_parallel_size=4"
    odd = known.QWEN2_5_7B | {"intermediate_size": 18946}
    assert f"{four} does not divide the model's feed-forward width of 18946; use 2." in errors_of(four, model=odd)
    experts = known.DEEPSEEK_V3 | {"moe_intermediate_size": 2046}
    lines = errors_of(four, f"{MEGATRON}.expert_tensor_parallel_size=1", model=experts)
    assert f"{four} does not divide the model's width of the shared expert of 2046; use 3." in lines
