"""Asynchronous training: the bound in force, and which log-probs are the old ones."""

from __future__ import annotations

import pytest

from dovetail.config import DovetailConfig, load_config

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
