"""Asynchronous training: what a mode needs of devices, bound and correction."""

from __future__ import annotations

from dovetail.config.checks.examined import Check, Examined, Findings


def _devices(run: Examined) -> Findings:
    settings, shared = run.config.async_training, run.config.actor_rollout_ref.hybrid_engine
    shared_async = settings.mode == "fully_async" and shared
    if settings.mode == "one_step_off" and shared:
        yield run.error(
            "<async_training.mode> generates while it trains, and with <actor_rollout_ref.hybrid_engine> both take "
            "turns; set hybrid_engine=False with @rollout.nnodes=1, or mode=fully_async."
        )
    elif shared_async and not settings.partial_rollout:
        yield run.error(
            "<async_training.partial_rollout> with <actor_rollout_ref.hybrid_engine> is a synchronous run: nothing is "
            "generated during an update; set partial_rollout=True, hybrid_engine=False, or async_training.mode=off."
        )
    elif shared_async and settings.trigger_parameter_sync_step > 1:
        yield run.error(
            "<async_training.trigger_parameter_sync_step> is for engines on devices of their own; with "
            "<actor_rollout_ref.hybrid_engine> they always have the newest weights; use 1."
        )
    if settings.mode != "off" and run.algorithm.adv_estimator == "remax":
        yield run.error(
            "<async_training.mode> takes groups as they come, and <algorithm.adv_estimator> needs a greedy response "
            "under the weights of each group; use grpo or rloo, or mode=off."
        )


def _engines(run: Examined) -> Findings:
    mode, policy, size = run.config.async_training.mode, run.config.actor_rollout_ref, run.rollout.engine_world_size
    if mode != "off" and size > 1:
        yield run.error(
            f"<rollout.tensor_model_parallel_size>: with <async_training.mode> the {size} processes of an engine would "
            "each generate groups of their own and wait for each other; use 1, or mode=off."
        )
    if mode == "fully_async" and policy.takes_adapters and policy.model.uses_lora and not policy.model.lora_merge:
        yield run.error(
            "<model.lora_merge>: with <async_training.mode> responses go on under the next adapter, and vLLM dies of a "
            "response whose own adapter is gone; use True."
        )


def _stalls(run: Examined) -> Findings:
    settings, tools = run.config.async_training, run.rollout.multi_turn
    watches = settings.mode != "off" and not run.config.actor_rollout_ref.hybrid_engine and settings.stall_timeout_s > 0
    if watches and run.rollout.uses_agents and settings.stall_timeout_s <= tools.tool_timeout_s:
        yield run.warning(
            "<async_training.stall_timeout_s> is no longer than a call of a tool may take "
            "(<rollout.multi_turn.tool_timeout_s>): a slow one would end the run as a stall; use "
            f"{2 * tools.tool_timeout_s:g}."
        )


def _staleness(run: Examined) -> Findings:
    settings, key = run.config.async_training, "async_training.max_staleness"
    bound, cycle = settings.staleness_bound, settings.trigger_parameter_sync_step
    if settings.mode == "one_step_off" and (bound != 1 or cycle != 1):
        yield run.error(
            f"@{key}={bound} and trigger_parameter_sync_step={cycle}: <async_training.mode> sends weights after every "
            "step and is one step behind; take both keys out, or use mode=fully_async."
        )
    elif settings.mode == "fully_async" and bound < cycle - 1:
        yield run.error(
            f"@{key}={bound}: with <async_training.trigger_parameter_sync_step> responses get {cycle - 1} steps old: "
            f"the run would wait for itself; use {cycle - 1} or more, or trigger_parameter_sync_step={bound + 1}."
        )


def _stale_responses(run: Examined) -> Findings:
    config, correction = run.config, run.algorithm.rollout_correction
    prox, bound = config.async_training.prox, config.staleness_bound
    if bound == 0 or prox is None:
        return
    if correction.bypass_mode:
        yield run.error(
            "<async_training.prox> makes old log-probs of its own, and <correction.bypass_mode> takes the engine's; "
            "set bypass_mode=False, or prox=null."
        )
    elif correction.rollout_is is None and correction.rollout_rs is None:
        yield run.warning(
            f"@correction.rollout_is is not set: with <async_training.prox> responses up to {bound} steps old count as "
            "fresh; set @correction.rollout_is=token, or prox=null."
        )
    if prox == "loglinear" and (run.algorithm.use_kl_in_reward or config.needs_sum_pi_squared):
        yield run.error(
            "<async_training.prox> is known only in the update, and algorithm.use_kl_in_reward or "
            "<algorithm.adv_estimator> reads old log-probs before it; use prox=recompute."
        )
    if prox == "loglinear" and correction.rollout_is_batch_normalize:
        yield run.error(
            "<correction.rollout_is_batch_normalize> needs the weights of the whole batch, and <async_training.prox> "
            "makes them micro-batch by micro-batch; use False, or prox=recompute."
        )


ASYNC_TRAINING: tuple[Check, ...] = (_devices, _engines, _stalls, _staleness, _stale_responses)
