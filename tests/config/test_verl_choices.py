"""Keys of verl that choose a program, a file or a user's class: what exists here is read, the rest is one error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.config import ConfigError, LoadedConfig, load_config
from dovetail.config.effects import unsupported_in_runs

pytestmark = pytest.mark.unit

ARR = "actor_rollout_ref"
ACTOR, ROLLOUT = f"{ARR}.actor", f"{ARR}.rollout"


def load(*overrides: str) -> LoadedConfig:
    return load_config(overrides=overrides)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (only,) = caught.value.problems
    return str(only)


@pytest.mark.parametrize("engine", ["veomni", "torchtitan", "automodel", "mindspeed"])
def test_an_engine_that_is_not_there_is_one_error_that_names_those_that_are(engine: str) -> None:
    message = problem(
        f"model_engine={engine}",
        f"{ACTOR}.strategy={engine}",
        f"{ACTOR}.{engine}.param_offload=True",
        f"{ACTOR}.engine.impl=x",
        f"{ARR}.ref.{engine}_config.size=2",
    )
    assert message.startswith(f"model_engine={engine} is not supported")
    assert "fsdp2" in message
    assert f"{ACTOR}.strategy=megatron" in message


@pytest.mark.parametrize("engine", ["dp", "fsdp"])
def test_the_usual_engine_is_the_default(engine: str) -> None:
    loaded = load(f"model_engine={engine}")
    assert (loaded.config.actor_rollout_ref.actor.strategy, loaded.notices) == ("fsdp2", ())


@pytest.mark.parametrize("choice", ["model_engine=dp", "model_engine=fsdp", f"actor@{ACTOR}=dp_actor"])
def test_another_engine_than_that_of_the_keys_below_it_is_an_error(choice: str) -> None:
    keys = f"{ACTOR}.megatron.tensor_model_parallel_size"
    assert problem(choice, f"{keys}=2") == f"{choice} and {keys} name different backends; keep one."
    assert load(choice, f"{keys}=2", f"{ACTOR}.strategy=megatron").config.actor_rollout_ref.actor.strategy == "megatron"


def test_megatron_is_a_strategy_unless_another_is_written() -> None:
    assert load("model_engine=megatron").config.critic.strategy == "megatron"
    explicit = load("model_engine=megatron", f"{ACTOR}.strategy=fsdp")
    assert explicit.config.actor_rollout_ref.actor.strategy == "fsdp"


@pytest.mark.parametrize("key", [f"actor@{ACTOR}", ACTOR])
def test_a_file_of_another_engine_is_one_error_and_not_one_for_each_of_its_keys(key: str) -> None:
    keys = [f"{ACTOR}.engine.{name}=1" for name in ("tp", "pp", "ep", "impl_cfg.use_thd")]
    for overrides in ([f"{key}=mlite_actor", *keys], [*keys, f"{key}=mlite_actor"]):
        assert problem(*overrides).startswith(f"actor@{ACTOR}=mlite_actor is not supported")


def test_verls_own_files_are_the_defaults_and_a_users_file_is_refused() -> None:
    actor = f"actor@{ACTOR}"
    assert load(f"{actor}=dp_actor", "critic@critic=dp_critic", f"model@{ARR}.model=hf_model").notices == ()
    loaded = load(f"{actor}=megatron_actor", "critic@critic=megatron_critic")
    assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert f"{actor}=megatron_actor is read as {ACTOR}.strategy=megatron." in map(str, loaded.notices)
    assert "set the keys that it holds" in problem(f"model@{ARR}.model=qwen_large")


def test_the_defaults_of_a_file_choose_the_engine_too(tmp_path: Path) -> None:
    def written(choice: str) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(f"defaults:\n  - ppo_trainer\n  - {choice}\n  - _self_\ndata: {{train_batch_size: 8}}\n")
        return file

    assert load_config([written("override model_engine: megatron")]).config.critic.strategy == "megatron"
    assert load_config([written(f"actor@{ACTOR}: ${{model_engine}}_actor")]).config.critic.strategy == "fsdp2"
    with pytest.raises(ConfigError, match="model_engine=veomni is not supported"):
        load_config([written("model_engine: veomni")])
    with pytest.raises(ConfigError, match=r"base is in its defaults, and .*base.yaml is not a file"):
        load_config([written("base")])


@pytest.mark.parametrize(
    ("harmless", "refused", "way_out"),
    [
        ("skip.rollout.enable=False", "skip.rollout.enable=True", "dovetail replay"),
        ("skip.rollout_tq.enable=False", "skip.rollout_tq.enable=True", "async_training.record=True"),
        ("skip.async_rollout.steps=[1]", "skip.async_rollout.enable=True", "dovetail replay"),
        (
            f"{ROLLOUT}.agent.agent_loop_manager_class=null",
            f"{ROLLOUT}.agent.agent_loop_manager_class=a.b.C",
            "agent_loop_config_path",
        ),
        (
            f"{ROLLOUT}.agent.custom_async_server.name=null",
            f"{ROLLOUT}.agent.custom_async_server.path=a.py",
            "register an engine",
        ),
        ("data.audio_key=audios", "data.audio_key=sounds", "sound would be left out"),
        (f"{ROLLOUT}.disaggregation.enabled=False", f"{ROLLOUT}.disaggregation.enabled=True", "one engine"),
        (f"{ROLLOUT}.quantization_config_file=null", f"{ROLLOUT}.quantization_config_file=a.json", "quantization"),
        (f"{ACTOR}.optim.optimizer_impl=torch.optim", f"{ACTOR}.optim.optimizer_impl=torchao.optim", "torch.optim"),
        (f"{ARR}.ref.model.override_config=null", f"{ARR}.ref.model.path=/other", "starting point"),
        ("data.output_path=null", "data.output_path=out.parquet", "dovetail generate"),
    ],
)
def test_what_would_be_another_run_is_refused_with_the_way_out(harmless: str, refused: str, way_out: str) -> None:
    load(harmless)
    message = problem(refused)
    assert message.startswith(f"{refused} is not supported")
    assert way_out in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ARR}.model.tiled_mlp.enabled=True", "not tiled"),
        (f"{ACTOR}.checkpoint.save_lora_only=True", "hold the base model too"),
    ],
)
def test_what_gives_the_same_model_is_a_notice(override: str, words: str) -> None:
    (notice,) = load(override).notices
    assert words in str(notice)


@pytest.mark.parametrize("manager", ["gdpo", "remote"])
def test_managers_that_score_one_response_at_a_time_are_the_naive_one(manager: str) -> None:
    loaded = load(f"reward.reward_manager.name={manager}")
    assert loaded.config.reward_model.reward_manager == "naive"
    assert f"reward_model.reward_manager={manager} is read as naive." in map(str, loaded.notices)


def test_the_bypass_loss_is_the_mode_with_the_loss_of_loss_type() -> None:
    mode, correction = f"{ACTOR}.policy_loss.loss_mode=bypass_mode", "algorithm.rollout_correction"
    config = load(mode, f"{correction}.loss_type=reinforce").config
    assert config.algorithm.rollout_correction.bypass_mode
    assert (config.actor_rollout_ref.actor.policy_loss.loss_mode, config.loss_mode_in_force) == ("vanilla", "reinforce")
    assert "keep algorithm.rollout_correction.bypass_mode only" in problem(mode, f"{correction}.bypass_mode=False")


def test_the_documented_keys_of_verls_presets_load_and_are_what_their_names_say() -> None:
    page = (Path(__file__).parents[2] / "docs/algorithms/rollout-correction.md").read_text(encoding="utf-8")
    short = dict(re.findall(r"`([PK])` is\n?\s?`([^`]+)`", page))
    presets = dict(re.findall(r"^\| `((?:decoupled|bypass)_\w+)` \| `([^`]+)` \|$", page, re.MULTILINE))
    assert (len(presets), len(short)) == (18, 2)
    for name, keys in presets.items():
        written = " ".join(short.get(word, word) for word in keys.split()).split()
        config = load(*(f"algorithm.rollout_correction.{key}" for key in written)).config
        assert unsupported_in_runs(config) == []
        correction = config.algorithm.rollout_correction
        assert correction.bypass_mode == name.startswith("bypass_")
        assert correction.loss_type == ("reinforce" if "_pg_" in name else "ppo_clip")
        weights = re.search(r"(token|seq)_(is|tis|icepop)|pg_is", name)
        level = None if weights is None else "token" if "token" in weights[0] else "sequence"
        assert correction.rollout_is == level
        rules = {"geo_rs": "seq_mean_k1", "k3_rs": "seq_mean_k3", "is_rs": "seq_sum_k1"}
        assert correction.rollout_rs == next((rule for part, rule in rules.items() if part in name), None)
        lower = correction.rollout_is_threshold_lower
        assert (correction.rollout_is_threshold, lower) == ((5.0, 0.5) if "icepop" in name else (2.0, None))


@pytest.mark.parametrize("role", [ACTOR, f"{ARR}.ref"])
def test_determinism_of_the_megatron_section_is_that_of_the_run(role: str) -> None:
    assert load(f"{role}.megatron_config.full_determinism=True").config.trainer.full_determinism


def test_conversations_have_their_old_spellings(tmp_path: Path) -> None:
    switch, tools = f"{ROLLOUT}.multi_turn=True", f"{ROLLOUT}.tool_kwargs.tools_config_file=/tools.yaml"
    most = f"{ROLLOUT}.multi_turn.max_assistant_turns=3"
    for overrides in ((switch, tools, most), (most, tools, switch)):
        turns = load(*overrides).config.actor_rollout_ref.rollout.multi_turn
        assert (turns.enable, turns.tool_config_path, turns.max_assistant_turns) == (True, "/tools.yaml", 3)
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {rollout: {multi_turn: True}}\n")
    assert load_config([file]).config.actor_rollout_ref.rollout.multi_turn.enable


def test_arguments_of_the_image_processor_reach_the_data_and_vllm() -> None:
    config = load(f"{ROLLOUT}.name=vllm", "+data.mm_processor_kwargs.max_pixels=3136").config
    assert config.data.mm_processor_kwargs == {"max_pixels": 3136}
    assert config.actor_rollout_ref.rollout.mm_processor_kwargs == {"max_pixels": 3136}


def test_processes_that_any_role_profiles_are_profiled() -> None:
    profiler = load(
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"{ACTOR}.profiler.enable=True",
        f"{ACTOR}.profiler.ranks=[0,8]",
        f"{ACTOR}.profiler.all_ranks=False",
        f"{ARR}.ref.profiler.ranks=[]",
        "critic.profiler.ranks=[8,9]",
    ).config.global_profiler
    assert [rank for rank in range(16) if profiler.profiles(rank)] == [0, 8, 9]
    every = load("global_profiler.steps=[2]", f"{ARR}.ref.profiler.all_ranks=True").config.global_profiler
    assert every.all_ranks
    assert load(f"{ACTOR}.profiler.ranks=[]").config.global_profiler.ranks == [0]


def test_the_memory_of_gpus_is_not_recorded_on_a_cpu() -> None:
    tool, cpu = "global_profiler.tool=torch_memory", "trainer.device=cpu"
    config = load(tool, cpu, "global_profiler.steps=[2]").config
    (refused,) = unsupported_in_runs(config)
    assert "use torch" in str(refused)
    assert unsupported_in_runs(load(tool, cpu).config) == []
    assert load(tool, "global_profiler.steps=[2]").config.global_profiler.chosen_steps == {2}
