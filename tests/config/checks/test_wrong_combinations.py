"""Wrong combinations of keys: each gives exactly one finding that names value, rule and fix."""

from __future__ import annotations

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

# What is changed; the severity; the key it is reported at; words of the message: value, rule, fix.
WRONG: list[tuple[tuple[str, ...], str, str, tuple[str, ...]]] = [
    # Asynchronous training.
    (
        (ONE_STEP_OFF, "actor_rollout_ref.hybrid_engine=True"),
        "error",
        "async_training.mode",
        ("=one_step_off", "take turns", "hybrid_engine=False"),
    ),
    (
        (ONE_STEP_OFF, *APART, "async_training.max_staleness=2"),
        "error",
        "async_training.max_staleness",
        ("=2", "one step behind", "mode=fully_async"),
    ),
    (
        (FULLY_ASYNC, *APART, "async_training.max_staleness=2", "async_training.trigger_parameter_sync_step=4"),
        "error",
        "async_training.max_staleness",
        ("=2", "would wait for itself", "use 3 or more", "trigger_parameter_sync_step=3"),
    ),
    (
        (FULLY_ASYNC, "async_training.partial_rollout=False"),
        "error",
        "async_training.partial_rollout",
        ("=False", "synchronous run", "partial_rollout=True"),
    ),
    (
        (FULLY_ASYNC, "async_training.trigger_parameter_sync_step=4"),
        "error",
        "async_training.trigger_parameter_sync_step",
        ("=4", "newest weights", "use 1"),
    ),
    (
        (FULLY_ASYNC, f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2"),
        "error",
        f"{R}.tensor_model_parallel_size",
        ("=2", "=fully_async", "groups of their own", "use 1"),
    ),
    (
        (FULLY_ASYNC, f"{R}.name=vllm", f"{M}.lora_rank=32", f"{M}.lora_merge=False", f"{A}.optim.lr=3e-5"),
        "error",
        f"{M}.lora_merge",
        ("=False", "=fully_async", "adapter is gone", "use True"),
    ),
    (
        (
            *(FULLY_ASYNC, *APART, "data.return_raw_chat=True"),
            *(f"{R}.multi_turn.enable=True", f"{R}.multi_turn.tool_timeout_s=400", f"{R}.agent.environment=a.B"),
        ),
        "warning",
        "async_training.stall_timeout_s",
        ("=300", "tool_timeout_s=400", "as a stall", "use 800"),
    ),
    (
        (FULLY_ASYNC, "algorithm.adv_estimator=remax"),
        "error",
        "async_training.mode",
        ("=fully_async", "greedy response", "use grpo"),
    ),
    (
        (FULLY_ASYNC, "async_training.prox=recompute"),
        "warning",
        f"{C}.rollout_is",
        ("=recompute", "1 steps old", f"{C}.rollout_is=token"),
    ),
    (
        (FULLY_ASYNC, "async_training.prox=recompute", f"{C}.bypass_mode=True"),
        "error",
        "async_training.prox",
        ("=recompute", "takes the engine's", "bypass_mode=False"),
    ),
    (
        (FULLY_ASYNC, "async_training.prox=loglinear", f"{C}.rollout_is=token", "algorithm.use_kl_in_reward=True"),
        "error",
        "async_training.prox",
        ("=loglinear", "only in the update", "use prox=recompute"),
    ),
    (
        (FULLY_ASYNC, "async_training.prox=loglinear", f"{C}.rollout_is=token", f"{C}.rollout_is_batch_normalize=True"),
        "error",
        f"{C}.rollout_is_batch_normalize",
        ("=loglinear", "the whole batch", "prox=recompute"),
    ),
    # Batches.
    (
        ("data.train_batch_size=33", f"{A}.ppo_mini_batch_size=3", f"{R}.n=2"),
        "error",
        "data.train_batch_size",
        ("=33", "data-parallel size 8", "multiple of 4, e.g. 36"),
    ),
    (
        ("data.train_batch_size=3", f"{A}.ppo_mini_batch_size=3", f"{R}.n=2", f"{A}.use_dynamic_bsz=True"),
        "error",
        "data.train_batch_size",
        ("=3 ", "data-parallel size 8", "multiple of 4, e.g. 4"),
    ),
    ((f"{A}.ppo_mini_batch_size=128",), "error", f"{A}.ppo_mini_batch_size", ("=128", "=64", "use 64 or less")),
    ((f"{A}.ppo_mini_batch_size=24",), "error", f"{A}.ppo_mini_batch_size", ("=24", "last mini-batch", "use 16")),
    (
        (f"{R}.kv_cache_dtype=fp8", "trainer.device=cpu"),
        "error",
        f"{R}.kv_cache_dtype",
        ("=fp8", "needs CUDA", "kv_cache_dtype=auto"),
    ),
    (
        (f"{R}.exact=True", f"{R}.dtype=float32"),
        "error",
        f"{R}.exact",
        ("=True", "the trainer computes in bfloat16", "dtype=bfloat16"),
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=32",),
        "warning",
        f"{A}.ppo_micro_batch_size_per_gpu",
        ("=32", "16 sequences", "use 16 or less"),
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=3",),
        "warning",
        f"{A}.ppo_micro_batch_size_per_gpu",
        ("=3", "last micro-batch", "use 2"),
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=null",),
        "error",
        f"{A}.ppo_micro_batch_size_per_gpu",
        ("not set", "use_dynamic_bsz=False", "use_dynamic_bsz=True"),
    ),
    (
        (*DYNAMIC, f"{A}.ppo_max_token_len_per_gpu=1024"),
        "error",
        f"{A}.ppo_max_token_len_per_gpu",
        ("=1024", "1536 tokens", "use 1536 or more"),
    ),
    (
        (*DYNAMIC, f"{A}.ppo_max_token_len_per_gpu=700", f"{A}.ulysses_sequence_parallel_size=2"),
        "error",
        f"{A}.ppo_max_token_len_per_gpu",
        ("=700 x 2 devices", "1536", "use 768"),
    ),
    (("data.train_max_samples=10",), "error", "data.train_max_samples", ("=10", "no step at all", "use 64")),
    (
        (
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_num_gen_batches=2",
            "data.gen_batch_size=16",
        ),
        "error",
        "algorithm.filter_groups.max_num_gen_batches",
        ("=2", "32 prompts", "data.gen_batch_size=64"),
    ),
    # Parallelism.
    ((f"{A}.strategy=single",), "error", f"{A}.strategy", ("single", "= 8", "n_gpus_per_node=1")),
    (
        (*MEGATRON, f"{A}.megatron.tensor_model_parallel_size=3"),
        "error",
        f"{A}.megatron",
        ("TP 3 x PP 1 x CP 1 = 3", "8 devices", "multiple of 3"),
    ),
    (
        (*MEGATRON, f"{A}.megatron.pipeline_model_parallel_size=8"),
        "error",
        f"{A}.megatron.pipeline_model_parallel_size",
        ("=8", "28 layers", "use 4"),
    ),
    (
        (*MEGATRON, f"{A}.megatron.virtual_pipeline_model_parallel_size=2"),
        "error",
        f"{A}.megatron.virtual_pipeline_model_parallel_size",
        ("=2", "stages", "=null"),
    ),
    (
        (*MEGATRON, f"{A}.megatron.expert_model_parallel_size=2"),
        "error",
        f"{A}.megatron.expert_model_parallel_size",
        ("=2", "no experts", "use 1"),
    ),
    (
        (f"{A}.ulysses_sequence_parallel_size=3",),
        "error",
        f"{A}.ulysses_sequence_parallel_size",
        ("=3", "8 devices", "use 2"),
    ),
    (
        (f"{A}.ulysses_sequence_parallel_size=8",),
        "error",
        f"{A}.ulysses_sequence_parallel_size",
        ("=8", "28 attention heads", "use 4"),
    ),
    (
        (f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=False"),
        "error",
        f"{A}.ulysses_sequence_parallel_size",
        ("=2", "use_remove_padding=False", "use_remove_padding=True"),
    ),
    ((f"{A}.fsdp_config.fsdp_size=3",), "error", f"{A}.fsdp_config.fsdp_size", ("=3", "8 devices", "use 2")),
    # Algorithm.
    (
        ("algorithm.adv_estimator=gae", "critic.enable=False"),
        "error",
        "critic.enable",
        ("gae needs values", "critic.enable=True"),
    ),
    (("critic.enable=True",), "warning", "critic.enable", ("never reads", "critic.enable=False")),
    ((f"{R}.n=1",), "warning", f"{R}.n", ("=1", "groups of 2 or more", "n=8")),
    (("algorithm.adv_estimator=rloo", f"{R}.n=1"), "warning", f"{R}.n", ("=1", "rloo", "n=8")),
    (
        (f"{A}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"),
        "warning",
        "algorithm.use_kl_in_reward",
        ("twice", "use_kl_in_reward=False"),
    ),
    (
        (
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0",
        ),
        "warning",
        "algorithm.kl_ctrl.kl_coef",
        ("=0", "multiplies", "0.001"),
    ),
    (
        (f"{A}.clip_ratio_low=0.28", f"{A}.clip_ratio_high=0.2"),
        "warning",
        f"{A}.clip_ratio_low",
        ("=0.28", "above", "clip_ratio_low=0.2"),
    ),
    (
        (f"{C}.rollout_rs=seq_max_k2", f"{C}.rollout_rs_threshold=0.5_2.0", f"{R}.calculate_log_probs=True"),
        "error",
        f"{C}.rollout_rs",
        ("=seq_max_k2", "=0.5_2.0", "one upper bound", "use 2"),
    ),
    (
        (f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=2_0.5", f"{R}.calculate_log_probs=True"),
        "error",
        f"{C}.rollout_rs",
        ("=2_0.5", "rejects everything", "use 0.5_2.0"),
    ),
    (
        (f"{C}.rollout_is=token", f"{C}.bypass_mode=True", f"{R}.calculate_log_probs=True"),
        "warning",
        f"{C}.rollout_is",
        ("1 everywhere", "rollout_is=null"),
    ),
    (
        ("algorithm.filter_groups.enable=True",),
        "warning",
        "algorithm.filter_groups.metric",
        ("not set", "acc"),
    ),
    # Rollout.
    (
        (f"{R}.tensor_model_parallel_size=3",),
        "error",
        f"{R}.tensor_model_parallel_size",
        ("=3", "8 devices", "use 2"),
    ),
    (
        (f"{R}.tensor_model_parallel_size=8",),
        "error",
        f"{R}.tensor_model_parallel_size",
        ("=8", "28 attention heads", "use 4"),
    ),
    ((f"{R}.temperature=0",), "error", f"{R}.temperature", ("=0", "identical", "temperature=1.0")),
    ((f"{R}.top_p=0.9",), "warning", f"{R}.top_p", ("=0.9", "distribution", "use 1.0")),
    ((f"{R}.val_kwargs.n=4",), "warning", f"{R}.val_kwargs.n", ("=4", "identical", "do_sample=True")),
    (("actor_rollout_ref.hybrid_engine=False",), "error", f"{R}.nnodes", ("=0", "own devices", "nnodes=1")),
    (
        (f"{R}.multi_turn.enable=True", "data.return_raw_chat=True"),
        "warning",
        f"{R}.multi_turn.enable",
        ("=True", "every response is one turn", "function_tool_path", f"{R}.agent.environment", "use False"),
    ),
    (
        (f"{R}.agent.environment=a.B", "data.return_raw_chat=False"),
        "error",
        "data.return_raw_chat",
        ("=False", "use True"),
    ),
    ((f"{R}.expert_parallel_size=4",), "error", f"{R}.expert_parallel_size", ("=4", "must be 1", "use 1")),
    # Lengths.
    (
        ("data.max_response_length=131072",),
        "error",
        "data.max_response_length",
        ("=131072", "context of 131072", "max_response_length=130560"),
    ),
    ((f"{R}.max_model_len=1024",), "error", f"{R}.max_model_len", ("=1024", "1536", "use 1536")),
    (
        (f"{R}.enable_chunked_prefill=False", f"{R}.max_num_batched_tokens=1024"),
        "error",
        f"{R}.max_num_batched_tokens",
        ("=1024", "1536 tokens", "use 1536"),
    ),
    (
        (
            "reward_model.reward_manager=dapo",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=1024",
        ),
        "warning",
        "reward_model.overlong_buffer.len",
        ("=1024", "1024 tokens", "use 204"),
    ),
    (
        (
            "reward_model.reward_manager=dapo",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=1025",
        ),
        "error",
        "reward_model.overlong_buffer.len",
        ("=1025", "more than the longest response of 1024", "use 204"),
    ),
    # Networks.
    (
        (*MEGATRON, f"{M}.lora_rank=32"),
        "error",
        f"{M}.lora_rank",
        ("=32", "megatron", "strategy=fsdp2"),
    ),
    ((f"{M}.lora_rank=32",), "warning", f"{A}.optim.lr", ("=1e-06", "adapters", "3e-5")),
    (
        (f"{M}.enable_activation_offload=True", f"{M}.enable_gradient_checkpointing=False"),
        "error",
        f"{M}.enable_activation_offload",
        ("=True", "enable_gradient_checkpointing=True"),
    ),
    (("reward_model.enable=True",), "error", "reward_model.model.path", ("not set", "folder")),
    # Schedule.
    (("data.train_files=[]",), "error", "data.train_files", ("empty", "name a file")),
    (
        ("trainer.rollout_data_dir=/a/b", "trainer.validation_data_dir=/a/b/"),
        "error",
        "trainer.validation_data_dir",
        ("=/a/b", "<step>.jsonl", "folder of its own"),
    ),
    (("trainer.resume_mode=resume_path",), "error", "trainer.resume_from_path", ("not set", "folder")),
    (("trainer.critic_warmup=5",), "warning", "trainer.critic_warmup", ("=5", "no critic", "use 0")),
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


@pytest.mark.parametrize(
    ("changes", "severity", "key", "words"), WRONG, ids=[" ".join(changes) for changes, *_ in WRONG]
)
def test_a_wrong_combination_gives_exactly_one_message(
    changes: tuple[str, ...], severity: str, key: str, words: tuple[str, ...], shape: ModelShape
) -> None:
    [finding] = findings_of(changes, shape)
    assert (finding.severity, finding.key) == (severity, key)
    for word in words:
        assert word in finding.message


def test_independent_mistakes_are_all_reported_at_once(shape: ModelShape) -> None:
    findings = findings_of((f"{R}.temperature=0", f"{A}.ppo_mini_batch_size=128", "data.train_files=[]"), shape)
    with pytest.raises(ConfigError) as raised:
        refuse_errors(findings)
    assert len(raised.value.problems) == 3


def test_without_a_model_the_checks_that_need_it_are_left_out() -> None:
    assert findings_of((f"{A}.ulysses_sequence_parallel_size=8",), None) == []


def test_a_mixture_of_experts_refuses_a_size_that_does_not_divide_its_experts() -> None:
    experts = shape_from_config({**known.QWEN3_30B_A3B, "num_experts": 6})
    changes = (*MEGATRON, f"{A}.megatron.expert_model_parallel_size=4")
    [finding] = findings_of(changes, experts)
    assert "6 experts; use 2" in finding.message
