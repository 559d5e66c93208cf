"""Estimator, critic, reference, KL, clipping, rollout correction: what one of them needs of the others."""

from __future__ import annotations

from dovetail.config.algorithm import ESTIMATORS_WITH_CRITIC, OPTIMAL_TOKEN_BASELINES
from dovetail.config.checks.examined import Check, Examined, Findings

GROUP_ESTIMATORS = frozenset(
    {"grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"}
    | OPTIMAL_TOKEN_BASELINES
)


def _critic(run: Examined) -> Findings:
    estimator, critic, trainer = run.config.algorithm.adv_estimator, run.config.critic, run.config.trainer
    steps = trainer.total_training_steps
    if estimator in ESTIMATORS_WITH_CRITIC and critic.enable is False:
        yield run.error(
            "<algorithm.adv_estimator> needs values and <critic.enable>; set critic.enable=True, or use grpo.",
            "critic.enable",
        )
    elif estimator not in ESTIMATORS_WITH_CRITIC and critic.enable:
        yield run.warning(
            "<critic.enable> trains a critic that <algorithm.adv_estimator> never reads; set critic.enable=False."
        )
    if trainer.critic_warmup and not run.config.uses_critic:
        yield run.warning("<trainer.critic_warmup> holds the actor back and there is no critic to warm up; use 0.")
    elif steps and trainer.critic_warmup >= steps:
        yield run.warning(f"<trainer.critic_warmup> covers all {steps} steps, so the actor is never trained; use less.")


def _groups(run: Examined) -> Findings:
    algorithm, filters = run.config.algorithm, run.config.algorithm.filter_groups
    if run.config.actor_rollout_ref.rollout.n == 1:
        if filters.enable:
            yield run.error(
                "<rollout.n> makes every group uniform, so <algorithm.filter_groups.enable> drops every prompt; "
                "use @rollout.n=8, or algorithm.filter_groups.enable=False."
            )
        elif algorithm.adv_estimator in GROUP_ESTIMATORS and run.config.scores_training:
            yield run.warning(
                "<rollout.n> leaves <algorithm.adv_estimator> nothing to compare a response with (it needs groups of "
                "2 or more); use @rollout.n=8, or algorithm.adv_estimator=reinforce_plus_plus."
            )
    if filters.enable and not filters.metric:
        yield run.warning(
            "@algorithm.filter_groups.metric is not set, so the scores of a group are compared; use acc, score, "
            "seq_reward or seq_final_reward."
        )


def _kl(run: Examined) -> Findings:
    actor, algorithm = run.config.actor_rollout_ref.actor, run.config.algorithm
    in_reward, no_coefficient = algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef == 0
    if actor.use_kl_loss and in_reward:
        yield run.warning(
            "<actor.use_kl_loss> and <algorithm.use_kl_in_reward> punish the same KL twice; set "
            "algorithm.use_kl_in_reward=False (GRPO), or use_kl_loss=False (PPO).",
            "algorithm.use_kl_in_reward",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield run.warning(
            "@actor.kl_loss_coef=0 computes the reference for a metric only; use 0.001, or @actor.use_kl_loss=False."
        )
    if in_reward and no_coefficient and algorithm.kl_ctrl.type == "adaptive":
        yield run.warning("@algorithm.kl_ctrl.kl_coef=0 stays 0: the controller multiplies it; start from 0.001.")
    elif in_reward and no_coefficient:
        yield run.warning(
            "@algorithm.kl_ctrl.kl_coef=0 computes the reference for a metric only; use 0.001, or "
            "algorithm.use_kl_in_reward=False."
        )


def _loss(run: Examined) -> Findings:
    actor = run.config.actor_rollout_ref.actor
    mode, low, high = actor.policy_loss.loss_mode, actor.clip_low, actor.clip_high
    if low > high and mode != "cispo":
        yield run.warning(
            f"@actor.clip_ratio_low={low} is above clip_ratio_high={high}; clip-higher wants clip_ratio_low={high}, "
            f"clip_ratio_high={low}."
        )
    elif low >= 1 and mode in ("vanilla", "gspo"):
        yield run.warning(f"@actor.clip_ratio_low={low} bounds ratios at 1 - {low} <= 0, where none gets; use 0.2.")
    elif mode == "vanilla" and actor.clip_ratio_c <= 1 + high:
        yield run.warning(
            f"<actor.clip_ratio_c> is inside the clip range, up to 1 + clip_ratio_high = {1 + high}; use 3.0 or so."
        )
    if mode == "gspo" and actor.loss_agg_mode == "token-mean":
        yield run.warning("<actor.loss_agg_mode> weights GSPO's sequence ratios by length; use seq-mean-token-mean.")


def _rollout_correction(run: Examined) -> Findings:
    correction, estimator = run.config.algorithm.rollout_correction, run.config.algorithm.adv_estimator
    threshold, lower = correction.rollout_is_threshold, correction.rollout_is_threshold_lower
    if correction.rollout_is and lower is not None and lower >= threshold:
        yield run.error(
            f"<correction.rollout_is_threshold_lower> is not below rollout_is_threshold={threshold}; "
            f"use {1 / threshold:g}."
        )
    if correction.bypass_mode and correction.rollout_is and correction.loss_type == "ppo_clip":
        yield run.warning(
            "<correction.rollout_is> is 1 everywhere with bypass_mode=True and loss_type=ppo_clip: the PPO ratio is "
            "already against the engine; set rollout_is=null, or loss_type=reinforce."
        )
    if run.config.needs_sum_pi_squared and correction.bypass_mode:
        cause = "algorithm.adv_estimator" if estimator in OPTIMAL_TOKEN_BASELINES else "actor.calculate_sum_pi_squared"
        yield run.error(
            f"<{cause}> reads sum_pi_squared, which comes with the actor's old log-probs, and <correction.bypass_mode> "
            "skips that pass; set bypass_mode=False, or use another estimator.",
            "correction.bypass_mode",
        )
    bounds = str(correction.rollout_rs_threshold).split(",")
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        yield run.error(
            "@correction.rollout_rs_threshold is not set and <correction.rollout_rs> needs bounds; use 2.0."
        )
    elif correction.rollout_rs is not None and len(bounds) not in (1, len(correction.rejection_rules)):
        yield run.error(
            f"<correction.rollout_rs_threshold> has {len(bounds)} bounds for the {len(correction.rejection_rules)} "
            "rules of <correction.rollout_rs>; give one, or one per rule."
        )


def _estimator_options(run: Examined) -> Findings:
    algorithm = run.config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield run.error(
            "@algorithm.gdpo_reward_keys is empty and <algorithm.adv_estimator> normalises several rewards one by one; "
            "name numbers that the reward function returns, e.g. [accuracy,format], or use grpo."
        )
    elif algorithm.adv_estimator == "gdpo" and weights is not None and len(weights) != len(keys):
        yield run.error(
            f"<algorithm.gdpo_reward_weights> has {len(weights)} numbers for the {len(keys)} rewards of "
            "<algorithm.gdpo_reward_keys>; give one for each."
        )
    if algorithm.use_pf_ppo and algorithm.adv_estimator not in ESTIMATORS_WITH_CRITIC:
        yield run.error(
            "<algorithm.use_pf_ppo> draws rows by their score, which suits advantages from a critic's values, and "
            "<algorithm.adv_estimator> compares rows; set algorithm.adv_estimator=gae, or use_pf_ppo=False."
        )


ALGORITHM: tuple[Check, ...] = (_critic, _groups, _kl, _loss, _rollout_correction, _estimator_options)
