"""What this version does not act on: a notice when it is set, a refusal when a run would be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import ConfigError, load_config
from dovetail.config.effects import refuse_unsupported, unsupported_in_runs

pytestmark = pytest.mark.unit

P, A, R = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
M, C = f"{P}.model", "algorithm.rollout_correction"
VLLM = f"{R}.name=vllm"

# What is set, last the key that is refused; words of the message: reason and fix.
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("trainer.device=npu",), "use cuda, cpu or auto"),
    ((f"{M}.hf_config_path=/a",), f"{M}.override_config"),
    ((f"{M}.lora_rank=8", f"{A}.fp8_recipe=rowwise"), "use null"),
    ((f"{A}.strategy=megatron", f"{A}.fp8_recipe=rowwise"), "override_transformer_config.fp8"),
    ((f"{R}.mode=server",), "use sync"),
    ((f"{R}.quantization=fp8",), "use null"),
    ((f"{R}.name=sglang", f"{R}.quantization=fp8"), "use null"),
    ((f"{R}.tensor_model_parallel_size=2",), "use 1"),
    ((VLLM, f"{R}.data_parallel_size=2"), "use 1"),
    ((f"{R}.repetition_penalty=1.1",), "use 1.0"),
    ((f"{R}.logprobs_mode=raw_logprobs",), "use temperature"),
    ((f"{P}.hybrid_engine=False", f"{R}.nnodes=1", f"{R}.weight_sync=disk"), "use broadcast"),
    (("reward_model.enable=True", "reward_model.enable_resource_pool=True"), "use False"),
    (
        (f"{C}.bypass_mode=True", f"{A}.policy_loss.loss_mode=gspo", f"{C}.loss_type=reinforce"),
        f"{A}.policy_loss.loss_mode=gspo",
    ),
    ((f"{C}.bypass_mode=True", f"{C}.rollout_is_batch_normalize=True"), "use False"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda value: value[-1] if value else "")
def test_a_run_refuses_it_and_a_plan_notices_it_once(overrides: tuple[str, ...], words: str) -> None:
    loaded, key = load_config(overrides=overrides), overrides[-1].partition("=")[0]
    (problem,) = unsupported_in_runs(loaded.config)
    assert problem.key == key
    assert problem.message.startswith(f"{key}=")
    assert words in problem.message
    (notice,) = [notice for notice in loaded.notices if notice.key == key]
    assert "planned all the same" in notice.message


def test_everything_that_cannot_be_run_is_listed_at_once() -> None:
    config = load_config(overrides=["trainer.device=npu", f"{R}.mode=server", f"{R}.repetition_penalty=2"]).config
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(config)
    assert len(caught.value.problems) == 3


def test_roles_that_do_not_run_are_not_asked() -> None:
    overrides = ["algorithm.adv_estimator=grpo", "critic.model.hf_config_path=/a"]
    assert unsupported_in_runs(load_config(overrides=overrides).config) == []


def test_megatron_keys_of_a_run_without_megatron_are_told() -> None:
    key = f"{A}.megatron.override_transformer_config.moe_router_dtype"
    notices = load_config(overrides=[f"{A}.strategy=fsdp2", f"{key}=fp32"]).notices
    assert any(key in str(notice) and "`strategy=megatron` only" in str(notice) for notice in notices)
    notices = load_config(overrides=[f"{A}.strategy=megatron", f"{key}=fp32"]).notices
    assert not any(key in str(notice) for notice in notices)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.return_raw_input_ids=True", "raw_prompt_ids"),
        (f"{M}.use_shm=True", "every process reads the weights from the folder"),
        (f"{C}.loss_type=reinforce", "bypass_mode=True reads it"),
        (f"{A}.fsdp_config.mixed_precision.buffer_dtype=bf16", "rotary tables float32"),
        (f"{R}.weight_sync=disk", "the same process"),
        (f"{R}.enable_chunked_prefill=False", "rollout.name=vllm"),
        (f"{R}.engine_kwargs.vllm.seed=1", "rollout.name=vllm"),
        (f"{R}.agent.num_workers=4", "beside the engine"),
        (f"{R}.multi_turn.tool_timeout_s=4", "one turn"),
        ("trainer.max_critic_ckpt_to_keep=2", "max_actor_ckpt_to_keep"),
        ("async_training.staleness_threshold=0.5", "take turns"),
        ("ray_init.timeline_json_file=/tmp/t.json", "metrics.jsonl"),
    ],
)
def test_a_key_that_is_not_acted_on_says_so_with_its_value(override: str, words: str) -> None:
    notices = [str(notice) for notice in load_config(overrides=[override]).notices]
    (notice,) = [notice for notice in notices if "no effect in this" in notice]
    assert override.split("=")[0] in notice
    assert words in notice


@pytest.mark.parametrize(
    "override",
    [
        f"{A}.fsdp_config.mixed_precision.buffer_dtype=fp32",
        f"{A}.checkpoint.save_contents=[model]",
        f"{A}.checkpoint.async_save=True",
        f"{R}.calculate_log_probs=True",
        f"{R}.weight_sync=colocated",
        "async_training.staleness_threshold=0.1",
        "trainer.rollout_data_dir=/tmp/answers",
        "trainer.validation_data_dir=/tmp/answers",
        "trainer.log_val_generations=10",
    ],
)
def test_what_happens_anyway_is_not_worth_a_notice(override: str) -> None:
    assert load_config(overrides=["data.val_files=a.parquet", override]).notices == ()


@pytest.mark.parametrize(("text", "count"), [("true", 1), ("false", 0), ("3", 3)])
def test_a_restart_may_be_asked_for_in_one_word(text: str, count: int) -> None:
    config = load_config(overrides=[VLLM, f"{R}.mode=async", f"{R}.restart_engine={text}"]).config
    assert config.actor_rollout_ref.rollout.restart_engine == count


def test_engine_settings_are_for_vllm() -> None:
    assert load_config(overrides=[VLLM, f"{R}.enable_prefix_caching=False"]).notices == ()


def test_memory_and_graphs_are_settings_of_the_native_engine_on_cuda_alone() -> None:
    keys = [f"{R}.gpu_memory_utilization=0.8", f"{R}.enforce_eager=True"]
    assert load_config(overrides=keys).notices == ()
    on_cpu = " ".join(str(notice) for notice in load_config(overrides=[*keys, "trainer.device=cpu"]).notices)
    assert all(word in on_cpu for word in ("on CUDA only", "gpu_memory_utilization", "enforce_eager"))


def test_input_tokenizer_is_the_policys_when_unset_and_none_when_null(tmp_path: Path) -> None:
    path = f"{M}.path=/models/a"
    key = "reward_model.model.input_tokenizer"
    assert load_config(overrides=[path]).config.reward_model.model.input_tokenizer == "/models/a"
    assert load_config(overrides=[path, f"{key}=null"]).config.reward_model.model.input_tokenizer is None
    assert load_config(overrides=[path, f"{key}=/b"]).config.reward_model.model.input_tokenizer == "/b"
    file = tmp_path / "run.yaml"
    file.write_text("reward_model: {model: {input_tokenizer: null}}")
    assert load_config([file], [path]).config.reward_model.model.input_tokenizer is None
