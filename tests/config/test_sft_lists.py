"""Launch lists of verl's `sft_trainer`: the engine that they choose, its keys, and engines not built in."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.config import ConfigError, LoadedConfig, load_config

pytestmark = pytest.mark.unit


def load(*overrides: str) -> LoadedConfig:
    return load_config(overrides=["trainer.method=sft", *overrides])


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_list_with_the_fsdp_engine_sets_the_actors_keys() -> None:
    loaded = load(
        *("engine=fsdp", "optim=fsdp", "model=hf_model", "model.path=/models/m", "model.use_remove_padding=True"),
        *("engine.ulysses_sequence_parallel_size=2", "engine.dtype=float16", "engine.model_dtype=bf16"),
        *("engine.param_offload=True", "engine.optimizer_offload=True", "engine.use_torch_compile=False"),
        *("engine.fsdp_size=4", "engine.use_remove_padding=True", "engine.grad_offload=False", "data.num_workers=3"),
        *(
            "checkpoint.save_contents=[model,hf_model]",
            "checkpoint.load_contents=[model]",
            "checkpoint.async_save=True",
        ),
        *("data.pad_mode=no_padding", "data.ignore_input_ids_mismatch=True", "trainer.profile_interval=[4,6]"),
        *("data.enable_thinking_key=thinks", "data.enable_thinking_default=False", "optim.betas='[0.9,0.95]'"),
    )
    actor, sharding = loaded.config.actor_rollout_ref.actor, loaded.config.actor_rollout_ref.actor.fsdp_config
    assert loaded.config.actor_rollout_ref.model.path == "/models/m"
    assert (actor.strategy, actor.ulysses_sequence_parallel_size, actor.use_torch_compile) == ("fsdp", 2, False)
    assert (sharding.mixed_precision.param_dtype, sharding.model_dtype, sharding.fsdp_size) == ("float16", "bf16", 4)
    assert (sharding.param_offload, sharding.optimizer_offload) == (True, True)
    saved = actor.checkpoint
    assert (saved.save_contents, saved.load_contents, saved.async_save) == (["model", "hf_model"], ["model"], True)
    assert actor.optim.betas == (0.9, 0.95)
    assert (loaded.config.sft.enable_thinking_key, loaded.config.sft.enable_thinking_default) == ("thinks", False)
    assert loaded.config.data.dataloader_num_workers == 3
    assert loaded.config.global_profiler.chosen_steps == {4, 5, 6}
    noticed = " ".join(map(str, loaded.notices))
    for key in ("engine", "optim=fsdp", "model=hf_model", "engine.dtype", "data.pad_mode", "ignore_input_ids_mismatch"):
        assert key in noticed
    assert not loaded.uses_short_names


def test_the_strategy_of_the_engine_is_more_exact_than_its_file() -> None:
    assert load("engine=fsdp", "engine.strategy=fsdp2").config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert load("engine.strategy=megatron").config.actor_rollout_ref.actor.strategy == "megatron"
    assert load("engine.context_parallel_size=2").config.actor_rollout_ref.actor.strategy == "megatron"
    assert load("model_engine=dp").config.actor_rollout_ref.actor.strategy == "fsdp2"
    of_both = load("engine.dtype=float16", "engine.model_dtype=bf16").config.actor_rollout_ref.actor
    assert (of_both.strategy, of_both.fsdp_config.mixed_precision.param_dtype) == ("fsdp2", "float16")


def test_a_list_with_the_megatron_engine_sets_the_actors_megatron_keys() -> None:
    loaded = load(
        *("engine=megatron", "engine.strategy=megatron", "optim=megatron", "optim.lr_decay_style=cosine"),
        *("engine.tensor_model_parallel_size=4", "engine.pipeline_model_parallel_size=2"),
        *("engine.virtual_pipeline_model_parallel_size=null", "engine.context_parallel_size=2"),
        *("engine.expert_model_parallel_size=8", "engine.expert_tensor_parallel_size=1", "engine.grad_offload=True"),
        *("engine.dtype=float16", "engine.use_torch_compile=False", "engine.use_dist_checkpointing=False"),
        *("+engine.override_transformer_config.recompute_granularity=full", "engine.use_megatron_fsdp=True"),
    )
    actor = loaded.config.actor_rollout_ref.actor
    parallel = actor.megatron
    assert (actor.strategy, actor.use_torch_compile, actor.optim.lr_scheduler_type) == ("megatron", False, "cosine")
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (4, 2)
    assert (parallel.virtual_pipeline_model_parallel_size, parallel.context_parallel_size) == (None, 2)
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == (8, 1)
    assert (parallel.grad_offload, parallel.dtype) == (True, "float16")
    assert parallel.override_transformer_config == {"recompute_granularity": "full"}
    assert any("use_megatron_fsdp=True: no effect" in str(notice) for notice in loaded.notices)


@pytest.mark.parametrize("name", ["automodel", "torchtitan", "veomni", "mlite"])
def test_an_engine_that_is_not_built_in_is_one_problem_whatever_is_set_below_it(name: str) -> None:
    rest = [f"optim={name}", "engine.tp_size=2", "engine.impl.kind=x", "optim.decay_type=cosine", "model.path=/m"]
    (only,) = problems(f"engine={name}", *rest)
    assert f"engine={name}" in only
    assert "fsdp, fsdp2 or megatron" in only
    (other,) = problems(f"model_engine={name}")
    assert f"model_engine={name}" in other


def test_the_short_name_of_an_engine_that_generates_stays_what_it_is() -> None:
    loaded = load("engine=vllm")
    assert loaded.config.actor_rollout_ref.rollout.name == "vllm"
    assert loaded.uses_short_names
    assert "rollout.name=nothing" in problems("engine=nothing")[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["engine=megatron", "engine.strategy=fsdp2"], "name different backends; keep one"),
        (["engine=fsdp", "engine.nonsense=1"], "engine.nonsense, which is read as"),
        (["trainer.profile_interval=[5,3]"], "the first not after the last"),
        (["data.pad_mode=left"], "use no_padding or right"),
        (["trainer.test_freq=each"], "an integer or one of after_each_epoch"),
        (["trainer.save_freq=-2"], "give a number of steps, or -1"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_meant_is_one_problem(override: list[str], message: str) -> None:
    (only,) = problems(*override)
    assert message in only


@pytest.mark.parametrize(("interval", "steps"), [("[-1,-1]", set()), ("[2,2]", {2})])
def test_an_interval_of_profiled_steps_includes_both_ends(interval: str, steps: Any) -> None:
    assert load(f"trainer.profile_interval={interval}").config.global_profiler.chosen_steps == steps
