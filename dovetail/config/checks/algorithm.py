"""Estimator, critic, reference, KL, clipping, rollout correction: what one of them needs of the others."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.algorithm import ESTIMATORS_WITH_CRITIC, OPTIMAL_TOKEN_BASELINES
from dovetail.config.checks.examined import Check, Examined
from dovetail.config.errors import Problem

GROUP_ESTIMATORS = frozenset(
    {"grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"}
    | OPTIMAL_TOKEN_BASELINES
)


def _critic(run: Examined) -> Iterator[Problem]:
    estimator, critic, trainer = run.config.algorithm.adv_estimator, run.config.critic, run.config.trainer
    if estimator in ESTIMATORS_WITH_CRITIC and critic.enable is False:
        yield run.error(
            "<algorithm.adv_estimator> needs values and <critic.enable>; set critic.enable=True, or use "
            "algorithm.adv_estimator=grpo, which needs no critic.",
            "critic.enable",
        )
    elif estimator not in ESTIMATORS_WITH_CRITIC and critic.enable:
        yield run.warning(
            "<critic.enable> trains a critic that <algorithm.adv_estimator> never reads; set critic.enable=False, or "
            "algorithm.adv_estimator=gae."
        )
    elif not run.config.uses_critic and critic.model.path != run.config.actor_rollout_ref.model.path:
        yield run.warning(
            "<critic.model.path> is set and <algorithm.adv_estimator> uses no critic; take the key out, or set "
            "algorithm.adv_estimator=gae."
        )
    if trainer.critic_warmup and not run.config.uses_critic:
        yield run.warning(
            "<trainer.critic_warmup> holds the actor back and there is no critic to warm up "
            "(<algorithm.adv_estimator>); use 0."
        )
    elif trainer.total_training_steps and trainer.critic_warmup >= trainer.total_training_steps:
        yield run.warning(
            "<trainer.critic_warmup> covers all <trainer.total_training_steps>, so the actor is never trained; "
            f"use less than {trainer.total_training_steps}."
        )


def _groups(run: Examined) -> Iterator[Problem]:
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
                "2 or more), so the score itself is the advantage; use @rollout.n=8, or "
                "algorithm.adv_estimator=reinforce_plus_plus."
            )
    if filters.enable and not filters.metric:
        yield run.warning(
            "<algorithm.filter_groups.enable> compares the responses of a group and @algorithm.filter_groups.metric is "
            "not set, so their scores are compared; use acc, score, seq_reward or seq_final_reward.",
            "algorithm.filter_groups.metric",
        )
    elif not filters.enable and filters.metric and filters.max_num_gen_batches:
        yield run.warning(
            f"<algorithm.filter_groups.metric> and max_num_gen_batches={filters.max_num_gen_batches} have no effect "
            "with <algorithm.filter_groups.enable>; set it to True to filter groups.",
            "algorithm.filter_groups.enable",
        )


def _kl(run: Examined) -> Iterator[Problem]:
    actor, algorithm = run.config.actor_rollout_ref.actor, run.config.algorithm
    control, in_reward = algorithm.kl_ctrl, algorithm.use_kl_in_reward
    if actor.use_kl_loss and in_reward:
        yield run.warning(
            "<actor.use_kl_loss> and <algorithm.use_kl_in_reward> punish the same KL twice; set "
            "algorithm.use_kl_in_reward=False (GRPO), or use_kl_loss=False (PPO).",
            "algorithm.use_kl_in_reward",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield run.warning(
            "@actor.kl_loss_coef=0 with use_kl_loss=True computes the reference for a metric only; use 0.001, or "
            "@actor.use_kl_loss=False, which saves that pass."
        )
    if not in_reward and control.type == "adaptive":
        yield run.warning(
            "<algorithm.kl_ctrl.type> steers the KL in the reward and <algorithm.use_kl_in_reward>; set "
            "algorithm.use_kl_in_reward=True, or type=fixed."
        )
    elif in_reward and control.kl_coef == 0 and control.type == "adaptive":
        yield run.warning(
            "@algorithm.kl_ctrl.kl_coef=0 stays 0: the adaptive controller multiplies it; start from 0.001."
        )
    elif in_reward and control.kl_coef == 0:
        yield run.warning(
            "@algorithm.kl_ctrl.kl_coef=0 with <algorithm.use_kl_in_reward> computes the reference for a metric only; "
            "use 0.001, or algorithm.use_kl_in_reward=False, which saves that pass."
        )


def _loss(run: Examined) -> Iterator[Problem]:
    actor = run.config.actor_rollout_ref.actor
    mode, low, high = actor.policy_loss.loss_mode, actor.clip_low, actor.clip_high
    if low > high and mode != "cispo":
        yield run.warning(
            f"@actor.clip_ratio_low={low} is above clip_ratio_high={high}; clip-higher wants the opposite: "
            f"clip_ratio_low={high}, clip_ratio_high={low}."
        )
    elif low >= 1 and mode in ("vanilla", "gspo"):
        yield run.warning(
            f"@actor.clip_ratio_low={low} puts the lower bound at 1 - {low} <= 0, which no ratio reaches; use 0.2."
        )
    elif mode == "vanilla" and actor.clip_ratio_c <= 1 + high:
        yield run.warning(
            f"<actor.clip_ratio_c> is inside the clip range (1 + clip_ratio_high = {1 + high}); dual clipping wants a "
            "bound beyond it, e.g. 3.0."
        )
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield run.warning(
            f"<actor.loss_scale_factor> has no effect with loss_agg_mode={actor.loss_agg_mode}; use "
            "loss_agg_mode=seq-mean-token-sum-norm, or take it out."
        )
    if mode == "gspo" and actor.loss_agg_mode == "token-mean":
        yield run.warning(
            "<actor.loss_agg_mode> weights the sequence ratios of policy_loss.loss_mode=gspo by length; GSPO is "
            "defined with seq-mean-token-mean."
        )


def _rollout_correction(run: Examined) -> Iterator[Problem]:
    correction, estimator = run.config.algorithm.rollout_correction, run.config.algorithm.adv_estimator
    threshold, lower = correction.rollout_is_threshold, correction.rollout_is_threshold_lower
    kept = run.config.actor_rollout_ref.rollout.calculate_log_probs or run.config.staleness_bound
    if correction.active and not kept:
        names = ("bypass_mode", "rollout_is", "rollout_rs")
        cause = next(name for name in names if getattr(correction, name) not in (None, False))
        yield run.warning(
            f"<correction.{cause}> compares with the engine's log-probs and <rollout.calculate_log_probs>; they are "
            "kept all the same, set it to True.",
            "rollout.calculate_log_probs",
        )
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
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield run.warning("<correction.loss_type> has no effect with bypass_mode=False; set bypass_mode=True.")
    if run.config.needs_sum_pi_squared and correction.bypass_mode:
        cause = "algorithm.adv_estimator" if estimator in OPTIMAL_TOKEN_BASELINES else "actor.calculate_sum_pi_squared"
        yield run.error(
            f"<{cause}> reads sum_pi_squared, which the actor computes with the old log-probs, and "
            "<correction.bypass_mode> skips that pass; set bypass_mode=False, or use another estimator.",
            "correction.bypass_mode",
        )
    if correction.rollout_rs is None:
        return
    if correction.rollout_rs_threshold is None:
        yield run.error(
            "<correction.rollout_rs> needs bounds and @correction.rollout_rs_threshold is not set; use 2.0.",
            "correction.rollout_rs_threshold",
        )
        return
    rules = [rule for rule in correction.rollout_rs.split(",") if rule.strip()]
    bounds = str(correction.rollout_rs_threshold).split(",")
    if len(bounds) not in (1, len(rules)):
        yield run.error(
            f"<correction.rollout_rs_threshold> has {len(bounds)} bounds for the {len(rules)} rules of "
            "<correction.rollout_rs>; give one, or one per rule."
        )


def _estimator_options(run: Examined) -> Iterator[Problem]:
    algorithm = run.config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield run.error(
            "<algorithm.adv_estimator> normalises several rewards one by one and @algorithm.gdpo_reward_keys is empty; "
            "name numbers that the reward function returns, e.g. [accuracy,format], or use grpo.",
            "algorithm.gdpo_reward_keys",
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
