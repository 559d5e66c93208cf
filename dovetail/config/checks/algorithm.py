"""Estimator, critic, reference, KL, clipping, rollout correction: what one of them needs of the others."""

from __future__ import annotations

from dovetail.config.algorithm import ESTIMATORS_WITH_CRITIC, OPTIMAL_TOKEN_BASELINES
from dovetail.config.checks.examined import Check, Examined, Findings
from dovetail.config.rejection import rejection_rules

GROUP_ESTIMATORS = frozenset(
    {"grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "max_rl", "reinforce_plus_plus_baseline"}
    | OPTIMAL_TOKEN_BASELINES
)


def _critic(run: Examined) -> Findings:
    needs_values, enable = run.algorithm.adv_estimator in ESTIMATORS_WITH_CRITIC, run.config.critic.enable
    warmup, steps = run.trainer.critic_warmup, run.trainer.total_training_steps
    if needs_values and enable is False:
        yield run.error("<algorithm.adv_estimator> needs values; set critic.enable=True, or use grpo.", "critic.enable")
    elif not needs_values and enable:
        yield run.warning("<critic.enable>, but <algorithm.adv_estimator> never reads it; set critic.enable=False.")
    if warmup and not run.config.uses_critic:
        yield run.warning("<trainer.critic_warmup> holds the actor back and there is no critic to warm up; use 0.")
    elif steps and warmup >= steps:
        yield run.warning(f"<trainer.critic_warmup> covers all {steps} steps: the actor is never trained; use less.")


def _groups(run: Examined) -> Findings:
    filters, estimator = run.algorithm.filter_groups, run.algorithm.adv_estimator
    if filters.enable and run.rollout.n == 1:
        yield run.error("<rollout.n>: <algorithm.filter_groups.enable> drops groups of one; use @rollout.n=8.")
    elif run.rollout.n == 1 and estimator in GROUP_ESTIMATORS and run.config.scores_training:
        yield run.warning("<rollout.n>, but <algorithm.adv_estimator> compares groups of 2 or more; use @rollout.n=8.")
    if filters.enable and not filters.metric:
        yield run.warning("@algorithm.filter_groups.metric is not set, so scores are compared; say score, or use acc.")


def _kl(run: Examined) -> Findings:
    in_loss, in_reward, control = run.actor.use_kl_loss, run.algorithm.use_kl_in_reward, run.algorithm.kl_ctrl
    if in_loss and in_reward:
        yield run.warning(
            "<algorithm.use_kl_in_reward> and <actor.use_kl_loss> punish the same KL twice; set "
            "use_kl_in_reward=False (GRPO), or use_kl_loss=False (PPO)."
        )
    if in_reward and run.algorithm.adv_estimator == "max_rl":
        yield run.error(
            "<algorithm.use_kl_in_reward> makes rewards negative, and <algorithm.adv_estimator> divides by their mean; "
            "set @actor.use_kl_loss=True instead.",
            "algorithm.use_kl_in_reward",
        )
    for key, switch in (
        ("actor.kl_loss_coef", "actor.use_kl_loss"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward"),
    ):
        if not run.value(switch) or run.value(key) != 0:
            continue
        if key.endswith(".kl_coef") and control.type == "adaptive":
            yield run.warning(f"@{key}=0 stays 0: the controller multiplies it; start from 0.001.")
        else:
            yield run.warning(f"@{key}=0 computes the reference for a metric only; use 0.001, or @{switch}=False.")


def _loss(run: Examined) -> Findings:
    actor, key = run.actor, "actor.clip_ratio_low"
    mode, low, high = actor.policy_loss.loss_mode, actor.clip_low, actor.clip_high
    if low > high and mode != "cispo":
        fix = f"clip-higher wants clip_ratio_low={high}, clip_ratio_high={low}"
        yield run.warning(f"@{key}={low} is above clip_ratio_high={high}; {fix}.")
    elif low >= 1 and mode in ("vanilla", "gspo"):
        yield run.warning(f"@{key}={low} bounds ratios at 1 - {low} <= 0, where none gets; use 0.2.")
    elif mode == "vanilla" and actor.clip_ratio_c <= 1 + high:
        yield run.warning(f"<actor.clip_ratio_c> is inside the clip range, up to {1 + high}; use 3.0 or so.")
    if mode == "gspo" and actor.loss_agg_mode == "token-mean":
        yield run.warning("<actor.loss_agg_mode> weights GSPO's sequence ratios by length; use seq-mean-token-mean.")


def _rollout_correction(run: Examined) -> Findings:
    correction, estimator = run.algorithm.rollout_correction, run.algorithm.adv_estimator
    threshold, lower = correction.rollout_is_threshold, correction.rollout_is_threshold_lower
    if correction.rollout_is and lower is not None and lower >= threshold:
        key = "correction.rollout_is_threshold_lower"
        yield run.error(f"<{key}> is not below rollout_is_threshold={threshold}; use {1 / threshold:g}.")
    if correction.bypass_mode and correction.rollout_is and correction.loss_type == "ppo_clip":
        yield run.warning(
            "<correction.rollout_is> is 1 everywhere with bypass_mode=True: the PPO ratio is against the engine "
            "already; set rollout_is=null, or loss_type=reinforce."
        )
    if run.config.needs_sum_pi_squared and correction.bypass_mode:
        cause = "algorithm.adv_estimator" if estimator in OPTIMAL_TOKEN_BASELINES else "actor.calculate_sum_pi_squared"
        yield run.error(
            f"<{cause}> reads sum_pi_squared, which comes with the actor's old log-probs, and <correction.bypass_mode> "
            "skips that pass; set bypass_mode=False, or use another estimator.",
            "correction.bypass_mode",
        )
    if correction.rollout_rs is not None:
        try:
            rejection_rules(correction.rollout_rs, correction.rollout_rs_threshold)
        except ValueError as error:
            yield run.error(f"<correction.rollout_rs> with <correction.rollout_rs_threshold>: {error}")


def _estimator_options(run: Examined) -> Findings:
    algorithm = run.algorithm
    keys, weights, gdpo = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, algorithm.adv_estimator == "gdpo"
    if gdpo and not keys:
        yield run.error(
            "@algorithm.gdpo_reward_keys is empty and <algorithm.adv_estimator> normalises several rewards one by one; "
            "name numbers that the reward function returns, e.g. [accuracy,format], or use grpo."
        )
    elif gdpo and weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        yield run.error(f"<{key}> has {len(weights)} numbers for {len(keys)} gdpo_reward_keys; give one for each.")
    if algorithm.use_pf_ppo and algorithm.adv_estimator not in ESTIMATORS_WITH_CRITIC:
        yield run.error(
            "<algorithm.use_pf_ppo> draws rows by score, and <algorithm.adv_estimator> compares rows; set "
            "algorithm.adv_estimator=gae, or use_pf_ppo=False."
        )


ALGORITHM: tuple[Check, ...] = (_critic, _groups, _kl, _loss, _rollout_correction, _estimator_options)
