"""The plan held against a run on one H200 (`benchmarks.gpu.grpo_step`, workload W; docs/performance.md)."""

from __future__ import annotations

import inspect

import pytest

from dovetail.config import load_config
from dovetail.config.plan import Plan, make_plan, shape_from_config
from dovetail.config.plan.engine_memory import LOGIT_ROWS, PAGE
from dovetail.config.plan.memory import PhaseMemory
from dovetail.rollout.native.cuda import decoder
from dovetail.rollout.native.cuda.batch import PagedBatch

pytestmark = pytest.mark.unit

GIB = 1 << 30
ONE_MORE_GPU = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
QWEN2_5_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def plan_of(*more: str, device_memory_gib: float = 139.8) -> Plan:
    policy = "actor_rollout_ref"
    config = load_config(
        overrides=[
            "data.train_files=prompts.jsonl",
            "data.train_batch_size=64",
            "data.max_prompt_length=128",
            "data.max_response_length=512",
            f"{policy}.model.path=model",
            f"{policy}.model.use_fused_kernels=True",
            f"{policy}.model.enable_gradient_checkpointing=False",
            f"{policy}.rollout.n=8",
            f"{policy}.rollout.max_num_seqs=512",
            f"{policy}.rollout.max_num_batched_tokens=65536",
            f"{policy}.actor.ppo_mini_batch_size=64",
            f"{policy}.actor.use_dynamic_bsz=True",
            f"{policy}.actor.ppo_max_token_len_per_gpu=20480",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cuda",
            "trainer.n_gpus_per_node=1",
            *more,
        ]
    ).config
    return make_plan(config, shape_from_config(QWEN2_5_1_5B), device_memory_gib=device_memory_gib)


def rollout_items(plan: Plan) -> dict[str, float]:
    assert plan.memory is not None
    return next(found.items for found in plan.memory.phases if found.name == "rollout")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


def phase_of(plan: Plan, name: str) -> PhaseMemory:
    assert plan.memory is not None
    return next(found for found in plan.memory.phases if found.name == name)


# GiB on the device, the driver's own included. The update's without the 9.62 GiB of the cache, which stayed, and
# without the gradient that the head keeps.
@pytest.mark.parametrize(("phase", "measured"), [("rollout", 31.05), ("update actor", 78.37 - 9.62)])
def test_a_phase_takes_what_was_planned_within_a_tenth(plan: Plan, phase: str, measured: float) -> None:
    planned = phase_of(plan, phase).needed / GIB
    assert planned == pytest.approx(measured, rel=0.1)
    assert planned > measured, "too little would be found out by running out of memory"


def test_the_gradient_that_the_head_keeps_takes_what_was_planned_within_a_tenth(plan: Plan) -> None:
    measured = 65.2 - 61.5  # peaks of the update with and without it
    planned = phase_of(plan, "update actor").optional / GIB
    assert planned == pytest.approx(measured, rel=0.1)
    assert planned > measured


@pytest.mark.parametrize(
    "setting",
    [
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.calculate_entropy=True",
        "actor_rollout_ref.model.use_fused_kernels=False",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
        "actor_rollout_ref.rollout.keep_sampling_mask=True",
        "trainer.full_determinism=True",
    ],
)
def test_a_head_that_keeps_no_gradient_is_planned_without_it(plan: Plan, setting: str) -> None:
    assert phase_of(plan_of(setting), "update actor").optional == 0


def test_no_gradient_is_kept_beside_offloaded_activations(plan: Plan) -> None:
    model = "actor_rollout_ref.model"
    checkpointing = plan_of(f"{model}.enable_gradient_checkpointing=True")
    offloading = plan_of(f"{model}.enable_gradient_checkpointing=True", f"{model}.enable_activation_offload=True")
    assert phase_of(checkpointing, "update actor").optional == phase_of(plan, "update actor").optional
    assert phase_of(offloading, "update actor").optional == 0


def test_a_kept_gradient_is_planned_where_as_much_as_the_head_takes_stays_free(plan: Plan) -> None:
    """So a plan that fits without it never fails for it."""
    kept = phase_of(plan, "update actor")
    least = (kept.total + kept.items["logits"]) / GIB
    for gib, optional in ((least + 0.01, kept.optional), (least - 0.01, 0.0), (kept.needed / GIB + 0.01, 0.0)):
        tight = plan_of(device_memory_gib=gib)
        found = phase_of(tight, "update actor")
        assert found.optional == optional
        assert found.fits
        assert found.needed == pytest.approx(kept.needed)


def test_the_cache_is_counted_in_the_pages_of_the_engine(plan: Plan) -> None:
    assert inspect.signature(PagedBatch.__init__).parameters["page_size"].default == PAGE
    assert rollout_items(plan)["KV cache"] / GIB == pytest.approx(9.62, rel=0.002)


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        (["async_training.mode=fully_async", "async_training.max_staleness=8", "async_training.max_in_flight=192"], 3),
        (["async_training.mode=fully_async", "async_training.max_staleness=8"], 1.125),
        (["async_training.mode=fully_async", "async_training.max_in_flight=16"], 1),  # a step needs its own
        (["async_training.mode=one_step_off", "actor_rollout_ref.hybrid_engine=False", *ONE_MORE_GPU], 2),
    ],
)
def test_the_cache_holds_what_asynchronous_training_has_in_flight(plan: Plan, more: list[str], steps: float) -> None:
    wide = plan_of(*more, "actor_rollout_ref.rollout.max_num_seqs=4096")
    assert rollout_items(wide)["KV cache"] == pytest.approx(steps * rollout_items(plan)["KV cache"])


def test_logits_are_counted_of_as_many_rows_as_the_engine_draws_at_a_time() -> None:
    assert decoder._LOGIT_ROWS == LOGIT_ROWS
    rollout = "actor_rollout_ref.rollout"
    same = ["data.train_batch_size=1024", f"{rollout}.max_num_batched_tokens=4096"]
    few, many = (rollout_items(plan_of(*same, f"{rollout}.max_num_seqs={count}")) for count in (LOGIT_ROWS, 8192))
    assert few["engine"] == many["engine"]
