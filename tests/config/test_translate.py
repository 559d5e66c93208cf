"""Older and other spellings end at one typed key, with a notice; keys without effect are never silent."""

from __future__ import annotations

import pytest

from dovetail.config import ConfigError, DovetailConfig, LoadedConfig, load_config
from dovetail.config.keys import catalogue, find_key, sections
from dovetail.config.translate import (
    FOREIGN_KEYS,
    GLOBAL_MICRO_BATCHES,
    TRANSLATIONS,
    VALUE_SPELLINGS,
    canonical,
    foreign_key,
)

pytestmark = pytest.mark.unit

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def load(*overrides: str) -> LoadedConfig:
    return load_config(overrides=overrides)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (only,) = caught.value.problems
    return str(only)


def test_the_first_generation_of_importance_sampling_is_a_token_cap() -> None:
    loaded = load(f"{ACTOR}.tis_imp_ratio_cap=2.5")
    correction = loaded.config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.5)
    assert len(loaded.notices) == 1
    assert not load(f"{ACTOR}.tis_imp_ratio_cap=-1").config.algorithm.rollout_correction.active


@pytest.mark.parametrize(
    ("overrides", "weights", "rejection", "bounds"),
    [
        (["rollout_is=True", "rollout_is_threshold=2.0", "rollout_is_level=sequence"], "sequence", None, None),
        (["rollout_is=False", "rollout_is_threshold=2.0"], None, None, None),
        (["rollout_is=True", "rollout_is_threshold=null"], None, None, None),
        (["rollout_is=True", "rollout_is_threshold=2", "rollout_is_mode=mask"], "token", "token_k1", "0.5_2"),
        (
            [
                "rollout_is=True",
                "rollout_is_threshold=1.001",
                "rollout_is_threshold_lower=0.999",
                "rollout_is_level=geometric",
                "rollout_is_mode=mask",
            ],
            None,
            "seq_mean_k1",
            "0.999_1.001",
        ),
    ],
)
def test_the_second_generation_of_importance_sampling(
    overrides: list[str], weights: str | None, rejection: str | None, bounds: str | None
) -> None:
    loaded = load(*(f"algorithm.{override}" for override in overrides))
    correction = loaded.config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_rs, correction.rollout_rs_threshold) == (
        weights,
        rejection,
        bounds,
    )
    assert len(loaded.notices) == 1


def test_a_geometric_importance_weight_is_refused_with_the_rule_to_use() -> None:
    message = problem("algorithm.rollout_is=True", "algorithm.rollout_is_level=geometric")
    assert f"{CORRECTION}.rollout_rs=seq_mean_k1" in message


def test_the_third_generation_has_older_names_too() -> None:
    correction = load(
        f"{CORRECTION}.rollout_rs=geometric",
        f"{CORRECTION}.rollout_rs_threshold=1.001",
        f"{CORRECTION}.rollout_rs_threshold_lower=0.99",
        f"{CORRECTION}.use_policy_gradient=True",
        f"{CORRECTION}.bypass_old_logprob_for_rollout=True",
    ).config.algorithm.rollout_correction
    assert correction.rollout_rs == "seq_mean_k1"
    assert correction.rollout_rs_threshold == "0.99_1.001"
    assert (correction.loss_type, correction.bypass_mode) == ("reinforce", True)
    vetoed = load(
        f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_token_veto_threshold=1e-4"
    ).config.algorithm.rollout_correction
    assert vetoed.rollout_rs == "token_k1,seq_max_k2"
    assert vetoed.rollout_rs_threshold == "2.0,42.4152"
    pair = load(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_4.0")
    assert pair.config.algorithm.rollout_correction.rollout_is_threshold == 4.0
    assert pair.config.algorithm.rollout_correction.rollout_is_threshold_lower == 0.5
    today = load(f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=0.999_1.001")
    assert today.notices == ()
    assert today.config.algorithm.rollout_correction.rollout_rs_threshold == "0.999_1.001"
    assert "no rejection rule" in problem(f"{CORRECTION}.rollout_rs=token_k9")


def test_two_generations_that_disagree_are_an_error_that_names_both() -> None:
    message = problem(f"{ACTOR}.tis_imp_ratio_cap=2", f"{CORRECTION}.rollout_is_threshold=3")
    assert f"{ACTOR}.tis_imp_ratio_cap" in message
    assert f"{CORRECTION}.rollout_is_threshold=3" in message


@pytest.mark.parametrize(
    "prefix",
    [
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ],
)
def test_the_overlong_buffer_has_one_place(prefix: str) -> None:
    buffer = load(f"+{prefix}.enable=True", f"+{prefix}.len=4096", f"+{prefix}.penalty_factor=0.5").config.reward_model
    assert (buffer.overlong_buffer.enable, buffer.overlong_buffer.len) == (True, 4096)
    assert buffer.reward_kwargs == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("critic.model.fsdp_config.param_offload=True", "critic.fsdp_config.param_offload"),
        ("critic.fsdp.optimizer_offload=True", "critic.fsdp_config.optimizer_offload"),
        ("reward.reward_manager.name=dapo", "reward_model.reward_manager"),
        ("reward_manager.name=dapo", "reward_model.reward_manager"),
        ("reward.num_workers=4", "reward_model.num_workers"),
        ("reward.custom_reward_function.path=/a.py", "custom_reward_function.path"),
        (f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip"),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type"),
        (f"{ACTOR}.optim.lr_decay_style=WSD", f"{ACTOR}.optim.lr_scheduler_type"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", f"{ACTOR}.ulysses_sequence_parallel_size"),
        ("rollout.nnodes=2", "actor_rollout_ref.rollout.nnodes"),
        ("ray_kwargs.ray_init.num_cpus=8", "ray_init.num_cpus"),
    ],
)
def test_other_spellings_end_at_the_typed_key_with_a_notice(old: str, new: str) -> None:
    loaded = load(old)
    node: object = loaded.tree
    for part in new.split("."):
        assert isinstance(node, dict)
        node = node[part]
    assert node is not None
    assert any(old.split("=")[0] in str(notice) and new in str(notice) for notice in loaded.notices)


def test_old_and_new_spelling_may_agree_but_not_disagree() -> None:
    assert (
        load(f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=0.5").config.actor_rollout_ref.actor.grad_clip == 0.5
    )
    message = problem(f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=1.0")
    assert f"{ACTOR}.optim.clip_grad=0.5" in message
    assert f"{ACTOR}.grad_clip=1.0" in message


def test_micro_batches_over_all_devices_are_divided_by_the_data_parallel_ranks() -> None:
    loaded = load(
        f"{ACTOR}.ppo_micro_batch_size=64",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
    )
    assert loaded.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8
    megatron = load("critic.ppo_micro_batch_size=16", f"{ACTOR}.megatron.tensor_model_parallel_size=4")
    assert megatron.config.critic.ppo_micro_batch_size_per_gpu == 8
    assert "8 data-parallel ranks" in problem(f"{ACTOR}.ppo_micro_batch_size=2")
    assert load(f"{ACTOR}.ppo_micro_batch_size=null").notices == ()


def test_megatron_keys_without_a_strategy_mean_megatron() -> None:
    loaded = load(f"{ACTOR}.megatron.pipeline_model_parallel_size=16")
    assert loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert loaded.config.critic.strategy == "megatron"
    explicit = load(f"{ACTOR}.megatron.pipeline_model_parallel_size=16", f"{ACTOR}.strategy=fsdp2")
    assert explicit.config.actor_rollout_ref.actor.strategy == "fsdp2"


@pytest.mark.parametrize(("written", "meant"), [("dummy_dtensor", "dummy"), ("dtensor", "dummy"), ("hf", "auto")])
def test_weight_loaders_of_other_days_are_read_as_the_engines_own_formats(written: str, meant: str) -> None:
    """Weights always travel under their Hugging Face names: there is one way to take them, for every sharding."""
    key = "actor_rollout_ref.rollout.load_format"
    loaded = load("actor_rollout_ref.rollout.name=vllm", f"{key}={written}")
    assert loaded.config.actor_rollout_ref.rollout.load_format == meant
    assert any(f"{key}={written} is read as {meant}" in str(notice) for notice in loaded.notices)


@pytest.mark.parametrize("key", ["trainer.test_freq", "trainer.save_freq"])
def test_a_frequency_of_zero_steps_is_read_as_never(key: str) -> None:
    loaded = load("data.val_files=a.parquet", f"{key}=0")
    assert loaded.tree["trainer"][key.partition(".")[2]] == -1
    assert [str(notice) for notice in loaded.notices] == [f"{key}=0 is read as -1."]


def test_every_translation_ends_at_a_key_that_exists() -> None:
    for rule in TRANSLATIONS:
        key, _ = canonical(rule.old.removesuffix(".*") + (".x" if rule.old.endswith(".*") else ""))
        if rule.new.endswith(".*"):
            key = key.removesuffix(".x")
            if any(
                name == key or name.startswith(f"{key}.") for name in (*sections(DovetailConfig), *catalogue_keys())
            ):
                continue
        assert find_key(DovetailConfig, key) or key in ("model_engine",) or key in catalogue_keys(), rule
    for key in (*VALUE_SPELLINGS, *GLOBAL_MICRO_BATCHES.values()):
        assert key in catalogue_keys()


def test_no_old_spelling_and_no_key_without_effect_is_also_a_typed_key() -> None:
    typed = catalogue_keys()
    assert [rule.old for rule in TRANSLATIONS if rule.old in typed] == []
    assert [key for key in typed if canonical(key)[0] != key] == []
    assert [key for key in typed if foreign_key(key) is not None] == []


def test_a_key_without_effect_prints_its_reason() -> None:
    loaded = load("actor_rollout_ref.rollout.layered_summon=True", "trainer.esi_redundant_time=null")
    (notice,) = loaded.notices
    assert "layered_summon" in str(notice)
    assert "never as a whole model" in str(notice)
    assert "layered_summon" not in str(loaded.tree)
    assert all(rule.why for rule in FOREIGN_KEYS)


def test_many_keys_without_effect_for_one_reason_make_one_notice() -> None:
    loaded = load(*(f"profiler.key{number}=1" for number in range(12)))
    assert len(loaded.notices) == 1
    assert "9 more" in str(loaded.notices[0])


def test_a_key_that_roles_share_and_this_role_does_not_use_says_so() -> None:
    (notice,) = load("actor_rollout_ref.ref.fsdp_config.optimizer_offload=True").notices
    assert "no optimizer" in str(notice)
    assert load("actor_rollout_ref.ref.fsdp_config.optimizer_offload=False").notices == ()


@pytest.mark.parametrize(
    ("harmless", "refused"),
    [
        (
            "actor_rollout_ref.actor.router_replay.replay_file=null",
            "actor_rollout_ref.actor.router_replay.replay_file=x",
        ),
        ("actor_rollout_ref.model.mtp.enable=False", "actor_rollout_ref.model.mtp.enable=True"),
        ("actor_rollout_ref.model.lora.type=lora", "actor_rollout_ref.model.lora.type=dora"),
        (
            "actor_rollout_ref.actor.optim.weight_decay_incr_style=constant",
            "critic.optim.weight_decay_incr_style=linear",
        ),
        ("actor_rollout_ref.actor.optim.muon_split_qkv=True", "actor_rollout_ref.actor.optim.muon_split_qkv=False"),
        ("actor_rollout_ref.rollout.use_fire_sampling=False", "actor_rollout_ref.rollout.use_fire_sampling=True"),
        ("actor_rollout_ref.rollout.skip_rollout=False", "actor_rollout_ref.rollout.skip_rollout=True"),
        ("actor_rollout_ref.actor.qat.enable=False", "actor_rollout_ref.actor.qat.enable=True"),
        ("actor_rollout_ref.actor.load_weight=True", "actor_rollout_ref.actor.load_weight=False"),
        ("data.min_response_length=0", "data.min_response_length=5"),
        ("critic.loss_scale_factor=null", "critic.loss_scale_factor=100"),
    ],
)
def test_what_would_change_the_algorithm_is_refused_and_not_noticed(harmless: str, refused: str) -> None:
    load(harmless)
    assert "not supported" in problem(refused)


def test_router_replay_of_verls_megatron_section_is_the_policys_and_other_roles_have_none() -> None:
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    loaded = load(f"{actor}.megatron.router_replay.mode=R2", f"{ref}.router_replay.mode=R2")
    assert loaded.config.actor_rollout_ref.actor.router_replay.mode == "R2"
    assert any("the policy alone replays" in str(notice) for notice in loaded.notices)


def catalogue_keys() -> set[str]:
    return set(catalogue(DovetailConfig))
