"""Placement, batch arithmetic and memory phases of whole configs, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.plan import Plan, Shapes, make_plan, read_shapes, shape_from_config
from dovetail.config.plan.batches import PassBatches
from dovetail.config.plan.memory import PhaseMemory
from dovetail.config.plan.model_shape import ModelShape
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

GIB = 1024**3
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Dynamic batching, Ulysses 8, 128 devices: the published DAPO recipe of Qwen2.5-32B.
DAPO_32B = (
    "data.train_files=train.parquet",
    "data.max_prompt_length=2048",
    "data.max_response_length=20480",
    "data.gen_batch_size=1536",
    "data.train_batch_size=512",
    "algorithm.adv_estimator=grpo",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=10",
    f"{A}.use_dynamic_bsz=True",
    f"{A}.ppo_max_token_len_per_gpu=22528",
    f"{A}.ppo_mini_batch_size=32",
    f"{A}.ulysses_sequence_parallel_size=8",
    f"{A}.fsdp_config.param_offload=True",
    f"{A}.fsdp_config.optimizer_offload=True",
    f"{R}.name=vllm",
    f"{R}.n=16",
    f"{R}.tensor_model_parallel_size=4",
    f"{R}.gpu_memory_utilization=0.8",
    "trainer.nnodes=16",
)
# Megatron with uneven stages and experts over 32, 512 devices: the published recipe of DeepSeek-V3.
DEEPSEEK = (
    "data.train_files=train.parquet",
    "data.max_prompt_length=2048",
    "data.max_response_length=8192",
    "data.train_batch_size=256",
    "algorithm.adv_estimator=grpo",
    f"{A}.strategy=megatron",
    f"{A}.ppo_mini_batch_size=32",
    f"{A}.ppo_micro_batch_size_per_gpu=2",
    f"{A}.megatron.param_offload=True",
    f"{A}.megatron.optimizer_offload=True",
    f"{A}.megatron.grad_offload=True",
    f"{A}.megatron.pipeline_model_parallel_size=16",
    f"{A}.megatron.expert_model_parallel_size=32",
    f"+{A}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3",
    f"+{A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=2",
    f"{R}.name=vllm",
    f"{R}.n=16",
    f"{R}.tensor_model_parallel_size=32",
    f"{R}.gpu_memory_utilization=0.6",
    "trainer.nnodes=64",
)


def plan_of(overrides: tuple[str, ...], model: dict[str, Any], *more: str, memory: float | None = None) -> Plan:
    config = load_config(overrides=[*overrides, *more]).config
    return make_plan(config, shape_from_config(model), device_memory_gib=memory)


def phase_of(plan: Plan, name: str) -> PhaseMemory:
    assert plan.memory is not None
    return next(phase for phase in plan.memory.phases if phase.name == name)


def pass_of(plan: Plan, name: str) -> PassBatches:
    return next(batch for batch in plan.batches.passes if batch.name == name)


def test_the_batch_arithmetic_of_the_32b_recipe() -> None:
    plan = plan_of(DAPO_32B, known.QWEN2_5_32B)
    actor, rollout = plan.layouts
    assert (actor.data_parallel, actor.sequence_parallel, actor.shard_size) == (16, 8, 128)
    assert (rollout.num_engines, rollout.tensor_parallel) == (32, 4)
    assert plan.batches.sequences == 8192
    assert plan.batches.max_tokens == 8192 * 22528
    assert plan.batches.sequences_per_engine == 1536 * 16 / 32
    update = pass_of(plan, "update actor")
    # 512 / 32 mini-batches; 32 x 16 sequences over 16 ranks; eight ranks pool their budgets, so 8 sequences a time.
    assert (update.mini_batches, update.sequences_per_mini_batch, update.micro_batches) == (16, 32, 4)
    assert update.optimizer_steps == 16
    assert update.tokens_per_device == 22528


def test_two_epochs_double_the_optimizer_steps_and_nothing_else() -> None:
    once = pass_of(plan_of(DAPO_32B, known.QWEN2_5_32B), "update actor")
    twice = pass_of(plan_of(DAPO_32B, known.QWEN2_5_32B, f"{A}.ppo_epochs=2"), "update actor")
    assert twice.optimizer_steps == 2 * once.optimizer_steps
    assert twice.mini_batches == once.mini_batches


def test_the_671b_recipe_fits_512_devices_of_96_gib_by_hand_computed_states() -> None:
    shape = shape_from_config(known.DEEPSEEK_V3)
    plan = plan_of(DEEPSEEK, known.DEEPSEEK_V3, memory=96)
    assert plan.memory is not None
    assert plan.memory.fits
    actor = plan.layouts[0]
    assert (actor.data_parallel, actor.pipeline_parallel, actor.expert_parallel) == (32, 16, 32)
    # The engine: everything over 32 tensor-parallel ranks in bf16.
    assert phase_of(plan, "weight sync").items["engine"] == pytest.approx(2 * shape.parameters / 32 + GIB, rel=1e-3)
    # Sixteen engines serve 4096 sequences.
    assert plan.batches.sequences_per_engine == 256
    update = phase_of(plan, "update actor")
    assert update.stage == 15
    layers = 2 * shape.layers[60].dense + 2 * shape.layers[60].routed_experts / 32
    assert update.items["weights"] == pytest.approx(2 * (layers + shape.head + shape.final_norm))


def test_the_same_recipe_does_not_fit_small_devices_and_says_why() -> None:
    plan = plan_of(DEEPSEEK, known.DEEPSEEK_V3, memory=40)
    assert plan.memory is not None
    assert not plan.memory.fits
    assert "does not fit in 40.0 GiB" in plan.memory.verdict
    assert any("update actor needs" in line and "use_fused_kernels=True" in line for line in plan.memory.advice)
    assert any("KV cache" in line and "tensor_model_parallel_size=64" in line for line in plan.memory.advice)


@pytest.mark.parametrize(("method", "role"), [("sft", "actor"), ("dpo", "actor"), ("reward", "critic")])
def test_training_on_a_data_set_needs_the_memory_of_the_same_update_in_rl(method: str, role: str) -> None:
    keys = ("data.train_files=x.parquet", "data.train_batch_size=64", "trainer.n_gpus_per_node=8")
    keys += (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=4096", f"{A}.ppo_mini_batch_size=64")
    keys += ("critic.ppo_max_token_len_per_gpu=4096",)
    rl = phase_of(plan_of(keys, known.QWEN2_5_7B), f"update {role}")
    plan = plan_of(keys, known.QWEN2_5_7B, f"trainer.method={method}")
    assert plan.memory is not None
    [phase] = plan.memory.phases
    states = ("weights", "gradients", "optimizer", "activations", "logits")
    assert {name: phase.items[name] for name in states} == {name: rl.items[name] for name in states}
    assert phase.total == sum(phase.items[name] for name in (*states, "runtime"))
    assert phase.fits
    assert [layout.role for layout in plan.layouts] == [role]
    update = pass_of(plan, f"update {role}")
    assert (plan.batches.sequences, update.optimizer_steps) == (64 if method == "sft" else 128, 1)
    tight = plan_of(keys, known.QWEN2_5_7B, f"trainer.method={method}", memory=10)
    assert tight.memory is not None
    assert not tight.memory.fits
    assert all(f"update {role} needs" in line for line in tight.memory.advice)


def test_a_teacher_of_its_own_devices_leaves_its_output_layer_with_the_student() -> None:
    keys = ["trainer.method=distill", "distill.teacher.path=x", f"{A}.use_dynamic_bsz=True", "distill.kl=full"]
    shape = shape_from_config(known.QWEN2_5_7B)
    shapes = Shapes(shape, teacher=shape_from_config(known.QWEN2_5_32B))

    def update(*more: str) -> PhaseMemory:
        return phase_of(make_plan(load_config(overrides=[*keys, *more]).config, shapes), "update actor")

    apart = ("distill.teacher.nnodes=1", "distill.teacher.n_gpus_per_node=4")
    layer = 2 * 152064 * 5120
    assert update(*apart).items["waiting roles"] == layer
    assert update(*apart, "distill.kl=top_k").items["waiting roles"] == 0
    # On shared devices the sharded teacher waits there too.
    assert update().items["waiting roles"] == pytest.approx(layer + 2 * 32_763_876_352 / 8)


def test_of_several_teachers_one_computes_and_all_wait() -> None:
    keys = ["trainer.method=distill", "distill.teachers.a=x", "distill.teachers.b=y", f"{A}.use_dynamic_bsz=True"]
    shape, large, small = map(shape_from_config, (known.QWEN2_5_7B, known.QWEN2_5_32B, known.QWEN2_5_7B))
    config = load_config(overrides=keys).config

    def waiting(*others: ModelShape, offload: bool = False) -> tuple[float, float]:
        plan = make_plan(
            load_config(overrides=[*keys, f"actor_rollout_ref.ref.fsdp_config.param_offload={offload}"]).config,
            Shapes(shape, teacher=large, other_teachers=others),
        )
        assert plan.memory is not None
        return phase_of(plan, "update actor").items["waiting roles"], plan.memory.host_bytes_per_node

    assert waiting(small)[0] - waiting()[0] == pytest.approx(2 * small.parameters / config.trainer.world_size)
    assert waiting(small, offload=True)[0] == waiting(offload=True)[0]
    assert waiting(small, offload=True)[1] - waiting(offload=True)[1] == pytest.approx(2 * small.parameters)


def test_following_the_advice_for_logits_makes_the_phase_smaller() -> None:
    before = phase_of(plan_of(DAPO_32B, known.QWEN2_5_32B), "update actor")
    after = phase_of(
        plan_of(DAPO_32B, known.QWEN2_5_32B, "actor_rollout_ref.model.use_fused_kernels=True"), "update actor"
    )
    # The fp32 gradient of the head's weight, and that of 22,528 tokens' logits in bf16.
    assert after.items["logits"] == 4 * 152064 * 5120 + 2 * 22528 * 152064
    # In its place two chunks of 1 GiB.
    assert after.optional == pytest.approx(2 * 22528 * 152064 - 2 * GIB)
    assert after.total < before.total - 25 * GIB


def test_offloaded_states_wait_on_the_host_and_others_on_the_device() -> None:
    offloaded = plan_of(DAPO_32B, known.QWEN2_5_32B)
    kept = plan_of(
        DAPO_32B,
        known.QWEN2_5_32B,
        f"{A}.fsdp_config.param_offload=False",
        f"{A}.fsdp_config.optimizer_offload=False",
    )
    assert phase_of(offloaded, "rollout").items["waiting roles"] == 0
    # fp32 weights and two fp32 moments over 128 devices.
    expected = 12 * 32_763_876_352 / 128
    assert phase_of(kept, "rollout").items["waiting roles"] == pytest.approx(expected)
    assert offloaded.memory is not None
    assert offloaded.memory.host_bytes_per_node == pytest.approx(8 * expected)


def test_an_engine_that_does_not_sleep_stays_in_every_phase() -> None:
    awake = plan_of(DAPO_32B, known.QWEN2_5_32B, f"{R}.free_cache_engine=False")
    assert phase_of(awake, "update actor").items["engine"] == pytest.approx(0.8 * 80 * GIB)
    assert not phase_of(awake, "update actor").fits


@pytest.mark.parametrize(("setting", "ratio"), [("kv_cache_dtype=fp8", 1 / 2), ("dtype=float32", 2)])
def test_a_token_takes_as_much_of_the_cache_as_its_dtype_says(setting: str, ratio: float) -> None:
    # 64 layers, keys and values of 8 heads of 128, over 4 devices, 2 bytes each.
    for more, expected in (((), 64 * 2 * 8 * 128 / 4 * 2), ((f"{R}.{setting}",), ratio * 64 * 2 * 8 * 128 / 4 * 2)):
        plan = plan_of(DAPO_32B, known.QWEN2_5_32B, *more)
        assert plan.memory is not None
        assert plan.memory.cached_tokens == int(phase_of(plan, "rollout").items["KV cache"] / expected)


def test_ppo_adds_the_critic_and_the_reference() -> None:
    plan = plan_of(DAPO_32B, known.QWEN2_5_32B, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True")
    assert [layout.role for layout in plan.layouts] == ["actor", "rollout", "ref", "critic"]
    names = [phase.name for phase in plan.memory.phases] if plan.memory else []
    assert names == [
        "rollout", "log-probs", "reference log-probs", "values", "update critic", "update actor", "weight sync",
    ]  # fmt: skip
    assert phase_of(plan, "update critic").items["logits"] < GIB


@pytest.mark.parametrize(
    ("more", "is_planned"),
    [
        ((), True),
        ((f"{A}.ppo_mini_batch_size=512",), False),
        ((f"{A}.ppo_mini_batch_size=512", f"{A}.ppo_epochs=2"), True),
        ((f"{A}.ppo_mini_batch_size=512", "algorithm.rollout_correction.rollout_is=token"), True),
        (("algorithm.rollout_correction.bypass_mode=True",), False),
    ],
)
def test_the_pass_for_old_log_probs_is_planned_where_a_step_has_one(more: tuple[str, ...], is_planned: bool) -> None:
    plan = plan_of(DAPO_32B, known.QWEN2_5_32B, f"{R}.calculate_log_probs=True", *more)
    assert ("log-probs" in [found.name for found in plan.batches.passes]) == is_planned
    assert plan.memory is not None
    assert ("log-probs" in [phase.name for phase in plan.memory.phases]) == is_planned


@pytest.mark.parametrize(
    ("more", "prompts"),
    [((), 512 - 32), ((f"{A}.ppo_epochs=2",), 512), ((f"{A}.calculate_sum_pi_squared=True",), 512)],
)
def test_the_pass_for_old_log_probs_is_planned_without_the_first_mini_batch(
    more: tuple[str, ...], prompts: int
) -> None:
    [found] = [
        found for found in plan_of(DAPO_32B, known.QWEN2_5_32B, *more).batches.passes if found.name == "log-probs"
    ]
    assert found.sequences_per_rank == prompts * 16 / 16  # 16 responses each, 128 devices in groups of 8


def test_engines_on_their_own_devices_leave_the_trainer_alone() -> None:
    plan = plan_of(
        DAPO_32B, known.QWEN2_5_32B, "actor_rollout_ref.hybrid_engine=False", f"{R}.nnodes=2", f"{R}.n_gpus_per_node=8"
    )
    rollout = plan.layouts[1]
    assert (rollout.pool, rollout.world_size, rollout.num_engines) == ("rollout", 16, 4)
    assert phase_of(plan, "update actor").items["engine"] == 0


def test_a_cpu_worker_gets_its_share_of_this_machine() -> None:
    overrides = ("trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{A}.ppo_micro_batch_size_per_gpu=1")
    one = plan_of(overrides, known.SMOLLM2_135M).memory
    assert one is not None
    assert one.device == "CPU worker"
    assert 0 < one.device_bytes < 4096 * GIB


def test_a_missing_model_costs_only_the_memory_part(tmp_path: Path) -> None:
    config = load_config(overrides=[*DAPO_32B, f"actor_rollout_ref.model.path={tmp_path}/none"]).config
    shapes = read_shapes(config)
    plan = make_plan(config, shapes)
    assert plan.memory is None
    assert plan.batches.sequences == 8192
    assert "config.json" in plan.notices[0]


def test_overridden_model_fields_change_the_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known.QWEN2_5_7B))
    changes = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "+actor_rollout_ref.model.override_config.num_hidden_layers=2",
    ]
    shapes = read_shapes(load_config(overrides=[*DAPO_32B, *changes]).config)
    assert shapes.policy is not None
    assert shapes.policy.num_layers == 2


def test_a_plan_is_json() -> None:
    plain = json.loads(json.dumps(plan_of(DEEPSEEK, known.DEEPSEEK_V3).to_dict()))
    assert plain["memory"]["phases"][0]["total"] > 0
    assert plain["model"]["parameters"] == 671_026_404_352
