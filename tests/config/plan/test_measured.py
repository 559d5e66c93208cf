"""The plan held against a run on one H200 (`benchmarks.gpu.grpo_step`, workload W; docs/performance.md)."""

from __future__ import annotations

import inspect

import pytest

from dovetail.config import load_config
from dovetail.config.plan import Plan, make_plan, shape_from_config
from dovetail.config.plan.engine_memory import PAGE
from dovetail.rollout.native.cuda.batch import PagedBatch

pytestmark = pytest.mark.unit

GIB = 1 << 30
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


@pytest.fixture(scope="module")
def plan() -> Plan:
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
        ]
    ).config
    return make_plan(config, shape_from_config(QWEN2_5_1_5B), device_memory_gib=139.8)


# GiB on the device, the driver's own included. The update's without the 9.62 GiB of the cache, which stayed.
@pytest.mark.parametrize(("phase", "measured"), [("rollout", 31.05), ("update actor", 78.37 - 9.62)])
def test_a_phase_takes_what_was_planned_within_a_tenth(plan: Plan, phase: str, measured: float) -> None:
    assert plan.memory is not None
    planned = next(found.total for found in plan.memory.phases if found.name == phase) / GIB
    assert planned == pytest.approx(measured, rel=0.1)
    assert planned > measured, "too little would be found out by running out of memory"


def test_the_cache_is_counted_in_the_pages_of_the_engine(plan: Plan) -> None:
    assert inspect.signature(PagedBatch.__init__).parameters["page_size"].default == PAGE
    assert plan.memory is not None
    rollout = next(found for found in plan.memory.phases if found.name == "rollout")
    assert rollout.items["KV cache"] / GIB == pytest.approx(9.62, rel=0.002)
