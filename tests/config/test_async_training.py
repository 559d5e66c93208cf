"""Asynchronous training: the bound in force, and which log-probs are the old ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import ConfigError, DovetailConfig, load_config

pytestmark = pytest.mark.unit

ASYNC = "async_training"
ONE_UPDATE = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
CORRECTION = "algorithm.rollout_correction"


def resolved(*overrides: str) -> DovetailConfig:
    return load_config(overrides=[*ONE_UPDATE, *overrides]).config


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (["mode=off", "max_staleness=3"], 0),
        (["mode=one_step_off"], 1),
        (["mode=fully_async"], 1),
        (["mode=fully_async", "max_staleness=0"], 0),
        (["mode=fully_async", "staleness_threshold=0"], 0),
        (["mode=fully_async", "staleness_threshold=1"], 1),
        (["mode=fully_async", "staleness_threshold=0", "trigger_parameter_sync_step=4"], 3),
        (["mode=fully_async", "staleness_threshold=0.1", "trigger_parameter_sync_step=4"], 4),
        (["mode=fully_async", "staleness_threshold=0.1", "trigger_parameter_sync_step=10"], 10),
    ],
)
def test_the_bound_follows_from_mode_and_share(overrides: list[str], bound: int) -> None:
    assert resolved(*(f"{ASYNC}.{override}" for override in overrides)).staleness_bound == bound


def test_staleness_0_leaves_every_log_prob_as_in_a_synchronous_run() -> None:
    sync = resolved()
    for config in (sync, resolved(f"{ASYNC}.mode=fully_async", f"{ASYNC}.max_staleness=0")):
        assert not config.needs_old_log_probs
        assert not config.algorithm.rollout_correction.bypass_mode
    assert not sync.has_log_prob_pass


@pytest.mark.parametrize(
    ("overrides", "bypass", "prox", "log_prob_pass"),
    [
        ([], True, None, False),
        ([f"{ASYNC}.prox=none"], True, None, False),
        ([f"{ASYNC}.prox=recompute"], False, "recompute", True),
        ([f"{CORRECTION}.bypass_mode=False"], False, "recompute", True),
        ([f"{CORRECTION}.bypass_mode=True"], True, None, False),
        ([f"{ASYNC}.prox=loglinear"], False, "loglinear", False),
        ([f"{ASYNC}.prox=loglinear", f"{CORRECTION}.bypass_mode=False"], False, "loglinear", False),
    ],
)
def test_stale_responses_always_have_an_old_policy(
    overrides: list[str], bypass: bool, prox: str | None, log_prob_pass: bool
) -> None:
    config = resolved(f"{ASYNC}.mode=fully_async", f"{ASYNC}.max_staleness=2", *overrides)
    assert config.algorithm.rollout_correction.bypass_mode is bypass
    assert config.async_training.prox == prox
    assert config.has_log_prob_pass is log_prob_pass
    assert config.needs_old_log_probs != config.interpolates_old_log_probs


def test_a_resolved_configuration_resolves_to_itself() -> None:
    for prox in ("none", "recompute", "loglinear"):
        config = resolved(f"{ASYNC}.mode=fully_async", f"{ASYNC}.prox={prox}")
        assert DovetailConfig.model_validate(config.model_dump(mode="json")) == config


def test_one_step_off_trains_in_the_order_of_the_draws_and_finishes_what_runs() -> None:
    settings = resolved(f"{ASYNC}.mode=one_step_off").async_training
    assert (settings.order_in_force, settings.finishes_before_update) == ("draw", True)
    settings = resolved(f"{ASYNC}.mode=fully_async").async_training
    assert (settings.order_in_force, settings.finishes_before_update) == ("finish", False)
    assert resolved(f"{ASYNC}.mode=fully_async", f"{ASYNC}.partial_rollout=False").async_training.finishes_before_update


@pytest.mark.parametrize(("generated", "steps"), [(8, 1), (9, 1), (10, 2), (24, 3), (1, 0)])
def test_dynamic_sampling_keeps_a_surplus_for_so_many_steps(generated: int, steps: int) -> None:
    config = resolved("algorithm.filter_groups.enable=True", f"data.gen_batch_size={generated}")
    assert config.surplus_steps == steps
    assert resolved().surplus_steps == 0


def messages(*overrides: str) -> str:
    return " ".join(notice.message for notice in load_config(overrides=overrides).notices)


def test_a_fully_asynchronous_list_counts_cycles_of_updates() -> None:
    overrides = [
        "data.train_batch_size=0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        f"{ASYNC}.require_batches=2",
    ]
    frequencies = ["trainer.test_freq=5", "trainer.save_freq=-1", "rollout.total_rollout_steps=1280"]
    config = load_config(overrides=[*overrides, *frequencies]).config
    assert (config.data.train_batch_size, config.async_training.trigger_parameter_sync_step) == (64, 4)
    assert (config.trainer.test_freq, config.trainer.save_freq, config.trainer.total_training_steps) == (20, -1, 20)
    assert (config.async_training.mode, config.actor_rollout_ref.hybrid_engine) == ("fully_async", False)
    (notice,) = [note for note in load_config(overrides=[*overrides, *frequencies]).notices if "cycle" in note.message]
    for words in ("a cycle of 256 prompts", "test_freq=5 cycles are 20 steps", "1280 prompts are 20 steps of 64"):
        assert words in notice.message
    again = DovetailConfig.model_validate(config.model_dump(mode="json"))
    assert again.trainer.test_freq == 20


def test_prompts_of_a_run_are_steps_of_its_batch() -> None:
    config = resolved("rollout.total_rollout_steps=100", "trainer.test_freq=5")
    assert (config.trainer.total_training_steps, config.trainer.test_freq) == (12, 5)
    assert "has no effect" in messages(*ONE_UPDATE, f"{ASYNC}.require_batches=4")


@pytest.mark.parametrize(
    ("name", "mode", "shared"),
    [("sync", "off", True), ("colocate_async", "fully_async", True), ("separate_async", "fully_async", False)],
)
def test_modes_of_v1_are_a_mode_and_a_placement(name: str, mode: str, shared: bool) -> None:
    sampler = ["trainer.v1.sampler.max_off_policy_threshold=3", "trainer.v1.sampler.max_off_policy_strategy=drop"]
    config = resolved(f"trainer.v1.trainer_mode={name}", *sampler)
    assert (config.async_training.mode, config.actor_rollout_ref.hybrid_engine) == (mode, shared)
    assert config.staleness_bound == (0 if mode == "off" else 3)
    assert config.async_training.on_stale == ("wait" if mode == "off" else "drop")


@pytest.mark.parametrize(
    ("overrides", "prox"),
    [
        ([f"{ASYNC}.use_rollout_log_probs=True"], None),
        ([f"{ASYNC}.use_rollout_log_probs=False"], "recompute"),
        (["actor_rollout_ref.actor.use_rollout_log_probs=False"], "recompute"),
        ([f"{ASYNC}.use_rollout_log_probs=True", f"{ASYNC}.compute_prox_log_prob=True"], "recompute"),
        ([f"{ASYNC}.compute_prox_log_prob=False"], None),
    ],
)
def test_the_switches_of_log_probs_choose_the_old_policy(overrides: list[str], prox: str | None) -> None:
    config = resolved(f"{ASYNC}.mode=fully_async", *overrides)
    assert config.async_training.prox == prox
    assert config.algorithm.rollout_correction.bypass_mode is (prox is None)


def test_switches_of_log_probs_that_disagree_are_named() -> None:
    with pytest.raises(ConfigError, match=r"use_rollout_log_probs=True and .*bypass_mode=False: .*keep one of the two"):
        resolved(f"{ASYNC}.mode=fully_async", f"{ASYNC}.use_rollout_log_probs=True", f"{CORRECTION}.bypass_mode=False")


def test_one_step_off_has_devices_of_its_own_unless_it_is_told_otherwise() -> None:
    assert not resolved(f"{ASYNC}.mode=one_step_off").actor_rollout_ref.hybrid_engine
    shared = resolved(f"{ASYNC}.mode=one_step_off", "actor_rollout_ref.hybrid_engine=True")
    assert shared.actor_rollout_ref.hybrid_engine


def test_a_bare_off_in_yaml_is_off(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("async_training:\n  mode: off\n")
    assert load_config([tmp_path / "run.yaml"]).config.async_training.mode == "off"


def test_the_group_size_beside_the_engines_own_has_no_effect() -> None:
    config = resolved("rollout.n=4", "actor_rollout_ref.rollout.n=8")
    assert config.actor_rollout_ref.rollout.n == 8
    assert "rollout.n=4 has no effect" in messages("rollout.n=4", "actor_rollout_ref.rollout.n=8")


def test_a_limit_that_nothing_reads_is_said_to_have_no_effect() -> None:
    keys = ["mode=fully_async", "max_staleness=2", "staleness_threshold=0.5", "max_in_flight=8"]
    overrides = ["actor_rollout_ref.hybrid_engine=False", *(f"async_training.{key}" for key in keys)]
    notices = [str(notice) for notice in load_config(overrides=overrides).notices]
    assert any(
        "staleness_threshold=0.5: no effect in this run: async_training.max_staleness" in notice for notice in notices
    )
    assert any("max_in_flight=8: no effect" in notice and "hybrid_engine=False" in notice for notice in notices)
