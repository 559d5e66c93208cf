"""Wrong combinations of keys: each gives exactly one finding that names value, rule and fix."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dovetail.config import ConfigError, Problem, load_config
from dovetail.config.checks import check_config, refuse_errors
from dovetail.config.plan import ModelShape, shape_from_config
from tests.config.plan import known_models as known

pytestmark = pytest.mark.unit

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
C = "algorithm.rollout_correction"

# Eight devices, Qwen2.5-7B (28 heads, 4 key-value heads, 28 layers, context 131072), GRPO.
VALID = (
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.train_batch_size=64",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    f"{A}.ppo_mini_batch_size=16",
    f"{A}.ppo_micro_batch_size_per_gpu=2",
    f"{R}.n=8",
    f"{R}.name=vllm",
    "algorithm.adv_estimator=grpo",
    "trainer.test_freq=5",
    f"{M}.path=/models/policy",
)
DYNAMIC = (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_micro_batch_size_per_gpu=null")
MEGATRON = (f"{A}.strategy=megatron",)
APART = ("actor_rollout_ref.hybrid_engine=False", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=8")
ONE_STEP_OFF, FULLY_ASYNC = "async_training.mode=one_step_off", "async_training.mode=fully_async"


class Wrong(NamedTuple):
    """Changes of the valid configuration, and the one finding they give, by words of its message: value, rule, fix."""

    severity: str
    changes: tuple[str, ...]
    key: str
    words: tuple[str, ...]


def error(*changes: str, says: tuple[str, ...], at: str = "") -> Wrong:
    """Reported at the key of the first change, unless it is `at` another."""
    return Wrong("error", changes, at or changes[0].partition("=")[0], says)


def warning(*changes: str, says: tuple[str, ...], at: str = "") -> Wrong:
    return error(*changes, says=says, at=at)._replace(severity="warning")


WRONG = [
    # Asynchronous training.
    error(
        ONE_STEP_OFF,
        "actor_rollout_ref.hybrid_engine=True",
        says=("=one_step_off", "take turns", "hybrid_engine=False"),
    ),
    error("async_training.max_staleness=2", ONE_STEP_OFF, *APART, says=("=2", "one step behind", "mode=fully_async")),
    error(
        "async_training.max_staleness=2",
        FULLY_ASYNC,
        *APART,
        "async_training.trigger_parameter_sync_step=4",
        says=("=2", "would wait for itself", "use 3 or more", "trigger_parameter_sync_step=3"),
    ),
    error(
        "async_training.partial_rollout=False", FULLY_ASYNC, says=("=False", "synchronous run", "partial_rollout=True")
    ),
    error("async_training.trigger_parameter_sync_step=4", FULLY_ASYNC, says=("=4", "newest weights", "use 1")),
    error(
        f"{R}.tensor_model_parallel_size=2",
        FULLY_ASYNC,
        f"{R}.name=vllm",
        says=("=2", "=fully_async", "groups of their own", "use 1"),
    ),
    error(
        f"{M}.lora_merge=False",
        FULLY_ASYNC,
        f"{R}.name=vllm",
        f"{M}.lora_rank=32",
        f"{A}.optim.lr=3e-5",
        says=("=False", "=fully_async", "adapter is gone", "use True"),
    ),
    warning(
        FULLY_ASYNC,
        *APART,
        "data.return_raw_chat=True",
        f"{R}.multi_turn.enable=True",
        f"{R}.multi_turn.tool_timeout_s=400",
        f"{R}.agent.environment=a.B",
        at="async_training.stall_timeout_s",
        says=("=300", "tool_timeout_s=400", "as a stall", "use 800"),
    ),
    error(FULLY_ASYNC, "algorithm.adv_estimator=remax", says=("=fully_async", "greedy response", "use grpo")),
    warning(
        FULLY_ASYNC,
        "async_training.prox=recompute",
        at=f"{C}.rollout_is",
        says=("=recompute", "1 steps old", f"{C}.rollout_is=token"),
    ),
    error(
        "async_training.prox=recompute",
        FULLY_ASYNC,
        f"{C}.bypass_mode=True",
        says=("=recompute", "takes the engine's", "bypass_mode=False"),
    ),
    error(
        "async_training.prox=loglinear",
        FULLY_ASYNC,
        f"{C}.rollout_is=token",
        "algorithm.use_kl_in_reward=True",
        says=("=loglinear", "only in the update", "use prox=recompute"),
    ),
    error(
        f"{C}.rollout_is_batch_normalize=True",
        FULLY_ASYNC,
        "async_training.prox=loglinear",
        f"{C}.rollout_is=token",
        says=("=loglinear", "the whole batch", "prox=recompute"),
    ),
    # Batches.
    error(
        "data.train_batch_size=33",
        f"{A}.ppo_mini_batch_size=3",
        f"{R}.n=2",
        says=("=33", "data-parallel size 8", "multiple of 4, e.g. 36"),
    ),
    error(
        "data.train_batch_size=3",
        f"{A}.ppo_mini_batch_size=3",
        f"{R}.n=2",
        f"{A}.use_dynamic_bsz=True",
        says=("=3 ", "data-parallel size 8", "multiple of 4, e.g. 4"),
    ),
    error(f"{A}.ppo_mini_batch_size=128", says=("=128", "=64", "use 64 or less")),
    error(f"{A}.ppo_mini_batch_size=24", says=("=24", "last mini-batch", "use 16")),
    error(f"{R}.kv_cache_dtype=fp8", "trainer.device=cpu", says=("=fp8", "needs CUDA", "kv_cache_dtype=auto")),
    error(
        f"{R}.exact=True", f"{R}.dtype=float32", says=("=True", "the trainer computes in bfloat16", "dtype=bfloat16")
    ),
    warning(f"{A}.ppo_micro_batch_size_per_gpu=32", says=("=32", "16 sequences", "use 16 or less")),
    warning(f"{A}.ppo_micro_batch_size_per_gpu=3", says=("=3", "last micro-batch", "use 2")),
    error(f"{A}.ppo_micro_batch_size_per_gpu=null", says=("not set", "use_dynamic_bsz=False", "use_dynamic_bsz=True")),
    error(f"{A}.ppo_max_token_len_per_gpu=1024", *DYNAMIC, says=("=1024", "1536 tokens", "use 1536 or more")),
    error(
        f"{A}.ppo_max_token_len_per_gpu=700",
        *DYNAMIC,
        f"{A}.ulysses_sequence_parallel_size=2",
        says=("=700 x 2 devices", "1536", "use 768"),
    ),
    error("data.train_max_samples=10", says=("=10", "no step at all", "use 64")),
    error(
        "algorithm.filter_groups.max_num_gen_batches=2",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "data.gen_batch_size=16",
        says=("=2", "32 prompts", "data.gen_batch_size=64"),
    ),
    # Parallelism.
    error(f"{A}.strategy=single", says=("single", "= 8", "n_gpus_per_node=1")),
    error(
        *MEGATRON,
        f"{A}.megatron.tensor_model_parallel_size=3",
        at=f"{A}.megatron",
        says=("TP 3 x PP 1 x CP 1 = 3", "8 devices", "multiple of 3"),
    ),
    error(f"{A}.megatron.pipeline_model_parallel_size=8", *MEGATRON, says=("=8", "28 layers", "use 4")),
    error(f"{A}.megatron.virtual_pipeline_model_parallel_size=2", *MEGATRON, says=("=2", "stages", "=null")),
    error(f"{A}.megatron.expert_model_parallel_size=2", *MEGATRON, says=("=2", "no experts", "use 1")),
    error(f"{A}.ulysses_sequence_parallel_size=3", says=("=3", "8 devices", "use 2")),
    error(f"{A}.ulysses_sequence_parallel_size=8", says=("=8", "28 attention heads", "use 4")),
    error(
        f"{A}.ulysses_sequence_parallel_size=2",
        f"{M}.use_remove_padding=False",
        says=("=2", "use_remove_padding=False", "use_remove_padding=True"),
    ),
    error(f"{A}.fsdp_config.fsdp_size=3", says=("=3", "8 devices", "use 2")),
    # Algorithm.
    error("critic.enable=False", "algorithm.adv_estimator=gae", says=("gae needs values", "critic.enable=True")),
    warning("critic.enable=True", says=("never reads", "critic.enable=False")),
    warning(f"{R}.n=1", says=("=1", "groups of 2 or more", "n=8")),
    warning(f"{R}.n=1", "algorithm.adv_estimator=rloo", says=("=1", "rloo", "n=8")),
    warning("algorithm.use_kl_in_reward=True", f"{A}.use_kl_loss=True", says=("twice", "use_kl_in_reward=False")),
    warning(
        "algorithm.kl_ctrl.kl_coef=0",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        says=("=0", "multiplies", "0.001"),
    ),
    error(
        "algorithm.use_kl_in_reward=True",
        "algorithm.adv_estimator=max_rl",
        says=("makes rewards negative", "max_rl", "use_kl_loss=True"),
    ),
    warning(f"{A}.clip_ratio_low=0.28", f"{A}.clip_ratio_high=0.2", says=("=0.28", "above", "clip_ratio_low=0.2")),
    error(
        f"{C}.rollout_rs=seq_max_k2",
        f"{C}.rollout_rs_threshold=0.5_2.0",
        f"{R}.calculate_log_probs=True",
        says=("=seq_max_k2", "=0.5_2.0", "one upper bound", "use 2"),
    ),
    error(
        f"{C}.rollout_rs=token_k1",
        f"{C}.rollout_rs_threshold=2_0.5",
        f"{R}.calculate_log_probs=True",
        says=("=2_0.5", "rejects everything", "use 0.5_2.0"),
    ),
    warning(
        f"{C}.rollout_is=token",
        f"{C}.bypass_mode=True",
        f"{R}.calculate_log_probs=True",
        says=("1 everywhere", "rollout_is=null"),
    ),
    warning("algorithm.filter_groups.enable=True", at="algorithm.filter_groups.metric", says=("not set", "acc")),
    # Rollout.
    error(f"{R}.tensor_model_parallel_size=3", says=("=3", "8 devices", "use 2")),
    error(f"{R}.tensor_model_parallel_size=8", says=("=8", "28 attention heads", "use 4")),
    error(f"{R}.temperature=0", says=("=0", "identical", "temperature=1.0")),
    warning(f"{R}.top_p=0.9", says=("=0.9", "biased", "keep_sampling_mask=True", "use top_p=1.0")),
    error(f"{R}.keep_sampling_mask=True", f"{R}.name=native", says=("nothing is cut", "use False", "top_k=20")),
    error(f"{R}.keep_sampling_mask=True", f"{R}.name=native", f"{R}.top_p=0.9", says=("top_k=-1", "use", "top_k=512")),
    warning(f"{R}.val_kwargs.n=4", says=("=4", "identical", "do_sample=True")),
    error("actor_rollout_ref.hybrid_engine=False", at=f"{R}.nnodes", says=("=0", "own devices", "nnodes=1")),
    warning(
        f"{R}.multi_turn.enable=True",
        "data.return_raw_chat=True",
        says=("=True", "every response is one turn", "function_tool_path", f"{R}.agent.environment", "use False"),
    ),
    error("data.return_raw_chat=False", f"{R}.agent.environment=a.B", says=("=False", "use True")),
    error(f"{R}.expert_parallel_size=4", says=("=4", "must be 1", "use 1")),
    # Lengths.
    error("data.max_response_length=131072", says=("=131072", "context of 131072", "max_response_length=130560")),
    error(f"{R}.max_model_len=1024", says=("=1024", "1536", "use 1536")),
    error(
        f"{R}.max_num_batched_tokens=1024",
        f"{R}.enable_chunked_prefill=False",
        says=("=1024", "1536 tokens", "use 1536"),
    ),
    warning(
        "reward_model.overlong_buffer.len=1024",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        says=("=1024", "1024 tokens", "use 204"),
    ),
    error(
        "reward_model.overlong_buffer.len=1025",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        says=("=1025", "more than the longest response of 1024", "use 204"),
    ),
    # Networks.
    error(f"{M}.lora_rank=32", *MEGATRON, says=("=32", "megatron", "strategy=fsdp2")),
    warning(f"{M}.lora_rank=32", at=f"{A}.optim.lr", says=("=1e-06", "adapters", "3e-5")),
    error(
        f"{M}.enable_activation_offload=True",
        f"{M}.enable_gradient_checkpointing=False",
        says=("=True", "enable_gradient_checkpointing=True"),
    ),
    error("reward_model.enable=True", at="reward_model.model.path", says=("not set", "folder")),
    # Schedule.
    error("data.train_files=[]", says=("empty", "name a file")),
    error(
        "trainer.validation_data_dir=/a/b/",
        "trainer.rollout_data_dir=/a/b",
        says=("=/a/b", "<step>.jsonl", "folder of its own"),
    ),
    error("trainer.resume_mode=resume_path", at="trainer.resume_from_path", says=("not set", "folder")),
    warning("trainer.critic_warmup=5", says=("=5", "no critic", "use 0")),
]


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_from_config(known.QWEN2_5_7B)


def findings_of(changes: tuple[str, ...], shape: ModelShape | None) -> list[Problem]:
    return check_config(load_config(overrides=[*VALID, *changes]).config, shape)


def test_the_base_is_valid_and_silent(shape: ModelShape) -> None:
    assert findings_of((), shape) == []
    assert findings_of(DYNAMIC, shape) == []
    assert findings_of(MEGATRON, shape) == []


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: " ".join(wrong.changes))
def test_a_wrong_combination_gives_exactly_one_message(wrong: Wrong, shape: ModelShape) -> None:
    [finding] = findings_of(wrong.changes, shape)
    assert (finding.severity, finding.key) == (wrong.severity, wrong.key)
    for word in wrong.words:
        assert word in finding.message


def test_independent_mistakes_are_all_reported_at_once(shape: ModelShape) -> None:
    findings = findings_of((f"{R}.temperature=0", f"{A}.ppo_mini_batch_size=128", "data.train_files=[]"), shape)
    with pytest.raises(ConfigError) as raised:
        refuse_errors(findings)
    assert len(raised.value.problems) == 3


def test_token_budgets_of_training_do_not_bound_what_is_only_generated(shape: ModelShape) -> None:
    """`generate` with a prompt that is longer than a run's budget: no key of it could be changed from Python."""
    assert not findings_of((f"{A}.ppo_max_token_len_per_gpu=1024", *DYNAMIC, "trainer.val_only=True"), shape)


def test_without_a_model_the_checks_that_need_it_are_left_out() -> None:
    assert findings_of((f"{A}.ulysses_sequence_parallel_size=8",), None) == []


def test_a_mixture_of_experts_refuses_a_size_that_does_not_divide_its_experts() -> None:
    experts = shape_from_config({**known.QWEN3_30B_A3B, "num_experts": 6})
    changes = (*MEGATRON, f"{A}.megatron.expert_model_parallel_size=4")
    [finding] = findings_of(changes, experts)
    assert "6 experts; use 2" in finding.message
