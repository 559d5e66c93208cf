"""Asynchronous training: what a mode needs of devices, bound and correction."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.checks.checked import Checked, error, warning
from dovetail.config.errors import Problem

ASYNC = "async_training"
CORRECTION = "algorithm.rollout_correction"


def mode_has_its_devices(run: Checked) -> Iterator[Problem]:
    settings, shared = run.config.async_training, run.config.actor_rollout_ref.hybrid_engine
    if settings.mode == "one_step_off" and shared:
        yield error(
            f"{ASYNC}.mode",
            f"{ASYNC}.mode=one_step_off generates while it trains, and actor_rollout_ref.hybrid_engine=True lets both "
            "take turns on the same devices; set hybrid_engine=False with actor_rollout_ref.rollout.nnodes=1, or "
            f"{ASYNC}.mode=fully_async, which carries unfinished responses over.",
        )
    elif settings.mode == "fully_async" and shared and not settings.partial_rollout:
        yield error(
            f"{ASYNC}.partial_rollout",
            f"{ASYNC}.partial_rollout=False finishes every response before an update, and with "
            "actor_rollout_ref.hybrid_engine=True nothing is generated during it: this is a synchronous run; set "
            f"partial_rollout=True, hybrid_engine=False, or {ASYNC}.mode=off.",
        )
    elif settings.mode == "fully_async" and shared and settings.trigger_parameter_sync_step > 1:
        yield error(
            f"{ASYNC}.trigger_parameter_sync_step",
            f"{ASYNC}.trigger_parameter_sync_step={settings.trigger_parameter_sync_step} is for engines on devices of "
            "their own, and actor_rollout_ref.hybrid_engine=True generates with the trainer's newest weights; use 1.",
        )


def staleness_can_be_kept(run: Checked) -> Iterator[Problem]:
    settings = run.config.async_training
    key, bound, cycle = f"{ASYNC}.max_staleness", settings.staleness_bound, settings.trigger_parameter_sync_step
    if settings.mode == "one_step_off" and (bound != 1 or cycle != 1):
        yield error(
            key,
            f"{key}={bound} and trigger_parameter_sync_step={cycle}: {ASYNC}.mode=one_step_off sends weights after "
            "every step and is one step behind; take both keys out, or use mode=fully_async.",
        )
    elif settings.mode == "fully_async" and bound < cycle - 1:
        yield error(
            key,
            f"{key}={bound} with {ASYNC}.trigger_parameter_sync_step={cycle}: the last step before new weights trains "
            f"on responses that are {cycle - 1} steps old, so the run would wait for itself; use {cycle - 1} or more, "
            f"or trigger_parameter_sync_step={bound + 1}.",
        )


def estimator_takes_a_stream(run: Checked) -> Iterator[Problem]:
    if run.config.async_training.mode != "off" and run.config.algorithm.adv_estimator == "remax":
        yield error(
            f"{ASYNC}.mode",
            f"{ASYNC}.mode={run.config.async_training.mode} takes groups as they come, and algorithm.adv_estimator="
            "remax generates a greedy response under the same weights as each group; use grpo or rloo, or mode=off.",
        )


def stale_responses_are_corrected(run: Checked) -> Iterator[Problem]:
    config, correction = run.config, run.config.algorithm.rollout_correction
    prox, bound = config.async_training.prox, config.staleness_bound
    if bound == 0 or prox is None:
        return
    if correction.bypass_mode:
        yield error(
            f"{ASYNC}.prox",
            f"{ASYNC}.prox={prox} makes old log-probs of its own, and {CORRECTION}.bypass_mode=True takes the "
            "engine's; set bypass_mode=False, or prox=null.",
        )
    elif correction.rollout_is is None and correction.rollout_rs is None:
        yield warning(
            f"{CORRECTION}.rollout_is",
            f"{ASYNC}.prox={prox} compares the update with the weights before it, so responses up to {bound} steps old "
            f"are trained on as if they were fresh; set {CORRECTION}.rollout_is=token, or prox=null, which clips "
            "against the engine.",
        )
    if prox == "loglinear" and (config.algorithm.use_kl_in_reward or config.needs_sum_pi_squared):
        yield error(
            f"{ASYNC}.prox",
            f"{ASYNC}.prox=loglinear is known only in the update, and algorithm.use_kl_in_reward or "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads old log-probs before it; use "
            "prox=recompute.",
        )
