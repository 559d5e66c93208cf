"""Estimator, critic, reference, KL, clipping, rollout correction: what one of them needs of the others."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.algorithm import ESTIMATORS_WITH_CRITIC, OPTIMAL_TOKEN_BASELINES
from dovetail.config.checks.checked import ACTOR, ROLLOUT, Checked, error, warning
from dovetail.config.errors import Problem

GROUP_ESTIMATORS = frozenset(
    {"grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"}
    | OPTIMAL_TOKEN_BASELINES
)
CORRECTION = "algorithm.rollout_correction"


def estimator_has_its_critic(run: Checked) -> Iterator[Problem]:
    estimator, critic = run.config.algorithm.adv_estimator, run.config.critic
    if estimator in ESTIMATORS_WITH_CRITIC and critic.enable is False:
        yield error(
            "critic.enable",
            f"algorithm.adv_estimator={estimator} needs values and critic.enable=False; set critic.enable=True, "
            "or use algorithm.adv_estimator=grpo, which needs no critic.",
        )
    elif estimator not in ESTIMATORS_WITH_CRITIC and critic.enable:
        yield warning(
            "critic.enable",
            f"critic.enable=True trains a critic that algorithm.adv_estimator={estimator} never reads; "
            "set critic.enable=False, or algorithm.adv_estimator=gae.",
        )
    elif not run.config.uses_critic and critic.model.path != run.config.actor_rollout_ref.model.path:
        yield warning(
            "critic.model.path",
            f"critic.model.path={critic.model.path} is set and algorithm.adv_estimator={estimator} uses no critic; "
            "take the key out, or set algorithm.adv_estimator=gae.",
        )


def critic_warmup_has_a_critic(run: Checked) -> Iterator[Problem]:
    trainer = run.config.trainer
    if trainer.critic_warmup and not run.config.uses_critic:
        yield warning(
            "trainer.critic_warmup",
            f"trainer.critic_warmup={trainer.critic_warmup} holds the actor back and there is no critic to warm up "
            f"(algorithm.adv_estimator={run.config.algorithm.adv_estimator}); use 0.",
        )
    elif trainer.total_training_steps and trainer.critic_warmup >= trainer.total_training_steps:
        yield warning(
            "trainer.critic_warmup",
            f"trainer.critic_warmup={trainer.critic_warmup} covers all trainer.total_training_steps="
            f"{trainer.total_training_steps}, so the actor is never trained; "
            f"use less than {trainer.total_training_steps}.",
        )


def groups_have_several_answers(run: Checked) -> Iterator[Problem]:
    estimator, n = run.config.algorithm.adv_estimator, run.config.actor_rollout_ref.rollout.n
    key = f"{ROLLOUT}.n"
    if n > 1:
        return
    if run.config.algorithm.filter_groups.enable:
        yield error(
            key,
            f"{key}=1 makes every group uniform, so algorithm.filter_groups.enable=True drops every prompt; "
            f"use {key}=8, or algorithm.filter_groups.enable=False.",
        )
    elif estimator in GROUP_ESTIMATORS:
        yield warning(
            key,
            f"{key}=1 leaves algorithm.adv_estimator={estimator} nothing to compare a response with (it needs groups "
            f"of "
            f"2 or more), so the score itself is the advantage; use {key}=8, or "
            "algorithm.adv_estimator=reinforce_plus_plus.",
        )


def filtered_groups_have_a_metric(run: Checked) -> Iterator[Problem]:
    filters = run.config.algorithm.filter_groups
    if filters.enable and not filters.metric:
        yield warning(
            "algorithm.filter_groups.metric",
            "algorithm.filter_groups.enable=True compares the responses of a group and "
            "algorithm.filter_groups.metric is not set, so their scores are compared; use acc, score, seq_reward or "
            "seq_final_reward.",
        )
    elif not filters.enable and filters.metric and filters.max_num_gen_batches:
        yield warning(
            "algorithm.filter_groups.enable",
            f"algorithm.filter_groups.metric={filters.metric} and max_num_gen_batches={filters.max_num_gen_batches} "
            "have no effect with algorithm.filter_groups.enable=False; set it to True to filter groups.",
        )


def kl_is_applied_once_and_with_weight(run: Checked) -> Iterator[Problem]:
    actor, algorithm = run.config.actor_rollout_ref.actor, run.config.algorithm
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield warning(
            "algorithm.use_kl_in_reward",
            f"{ACTOR}.use_kl_loss=True and algorithm.use_kl_in_reward=True punish the same KL twice; "
            "set algorithm.use_kl_in_reward=False (GRPO), or use_kl_loss=False (PPO).",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield warning(
            f"{ACTOR}.kl_loss_coef",
            f"{ACTOR}.kl_loss_coef=0 with use_kl_loss=True computes the reference for a metric only; "
            f"use 0.001, or {ACTOR}.use_kl_loss=False, which saves that pass.",
        )


def kl_controller_can_move(run: Checked) -> Iterator[Problem]:
    algorithm = run.config.algorithm
    control = algorithm.kl_ctrl
    if not algorithm.use_kl_in_reward:
        if control.type == "adaptive":
            yield warning(
                "algorithm.kl_ctrl.type",
                "algorithm.kl_ctrl.type=adaptive steers the KL in the reward and algorithm.use_kl_in_reward=False; "
                "set algorithm.use_kl_in_reward=True, or type=fixed.",
            )
    elif control.kl_coef == 0 and control.type == "adaptive":
        yield warning(
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_ctrl.kl_coef=0 stays 0: the adaptive controller multiplies it; start from 0.001.",
        )
    elif control.kl_coef == 0:
        yield warning(
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_ctrl.kl_coef=0 with algorithm.use_kl_in_reward=True computes the reference for a "
            "metric only; "
            "use 0.001, or algorithm.use_kl_in_reward=False, which saves that pass.",
        )


def clip_range_is_plausible(run: Checked) -> Iterator[Problem]:
    actor = run.config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    low, high = actor.clip_low, actor.clip_high
    if low > high and mode != "cispo":
        yield warning(
            f"{ACTOR}.clip_ratio_low",
            f"{ACTOR}.clip_ratio_low={low} is above clip_ratio_high={high}; clip-higher wants the opposite: "
            f"clip_ratio_low={high}, clip_ratio_high={low}.",
        )
    elif low >= 1 and mode in ("vanilla", "gspo"):
        yield warning(
            f"{ACTOR}.clip_ratio_low",
            f"{ACTOR}.clip_ratio_low={low} puts the lower bound at 1 - {low} <= 0, which no ratio reaches; use 0.2.",
        )
    elif mode == "vanilla" and actor.clip_ratio_c <= 1 + high:
        yield warning(
            f"{ACTOR}.clip_ratio_c",
            f"{ACTOR}.clip_ratio_c={actor.clip_ratio_c} is inside the clip range (1 + clip_ratio_high = {1 + high}); "
            "dual clipping wants a bound beyond it, e.g. 3.0.",
        )


def loss_scale_is_used(run: Checked) -> Iterator[Problem]:
    actor = run.config.actor_rollout_ref.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield warning(
            f"{ACTOR}.loss_scale_factor",
            f"{ACTOR}.loss_scale_factor={actor.loss_scale_factor} has no effect with loss_agg_mode="
            f"{actor.loss_agg_mode}; use loss_agg_mode=seq-mean-token-sum-norm, or take it out.",
        )
    if actor.policy_loss.loss_mode == "gspo" and actor.loss_agg_mode == "token-mean":
        yield warning(
            f"{ACTOR}.loss_agg_mode",
            f"{ACTOR}.loss_agg_mode=token-mean weights the sequence ratios of policy_loss.loss_mode=gspo by length; "
            "GSPO is defined with seq-mean-token-mean.",
        )


def correction_has_log_probs(run: Checked) -> Iterator[Problem]:
    correction = run.config.algorithm.rollout_correction
    if not correction.active or run.config.actor_rollout_ref.rollout.calculate_log_probs or run.config.staleness_bound:
        return
    names = ("bypass_mode", "rollout_is", "rollout_rs")
    cause = next(name for name in names if getattr(correction, name) not in (None, False))
    yield warning(
        f"{ROLLOUT}.calculate_log_probs",
        f"{CORRECTION}.{cause}={getattr(correction, cause)} compares with the engine's log-probs and "
        f"{ROLLOUT}.calculate_log_probs=False; they are kept all the same, set it to True.",
    )


def correction_is_consistent(run: Checked) -> Iterator[Problem]:
    correction = run.config.algorithm.rollout_correction
    lower = correction.rollout_is_threshold_lower
    if correction.rollout_is and lower is not None and lower >= correction.rollout_is_threshold:
        yield error(
            f"{CORRECTION}.rollout_is_threshold_lower",
            f"{CORRECTION}.rollout_is_threshold_lower={lower} is not below rollout_is_threshold="
            f"{correction.rollout_is_threshold}; use {1 / correction.rollout_is_threshold:g}.",
        )
    if correction.bypass_mode and correction.rollout_is and correction.loss_type == "ppo_clip":
        yield warning(
            f"{CORRECTION}.rollout_is",
            f"{CORRECTION}.rollout_is={correction.rollout_is} is 1 everywhere with bypass_mode=True and "
            "loss_type=ppo_clip: the PPO ratio is already against the engine; set rollout_is=null, "
            "or loss_type=reinforce.",
        )
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield warning(
            f"{CORRECTION}.loss_type",
            f"{CORRECTION}.loss_type=reinforce has no effect with bypass_mode=False; set bypass_mode=True.",
        )


def squares_have_a_log_prob_pass(run: Checked) -> Iterator[Problem]:
    estimator = run.config.algorithm.adv_estimator
    if run.config.needs_sum_pi_squared and run.config.algorithm.rollout_correction.bypass_mode:
        cause = f"algorithm.adv_estimator={estimator}"
        if estimator not in OPTIMAL_TOKEN_BASELINES:
            cause = f"{ACTOR}.calculate_sum_pi_squared=True"
        yield error(
            f"{CORRECTION}.bypass_mode",
            f"{cause} reads sum_pi_squared, which the actor computes with the old log-probs, and "
            f"{CORRECTION}.bypass_mode=True skips that pass; set bypass_mode=False, or use another estimator.",
        )


def gdpo_has_one_weight_per_reward(run: Checked) -> Iterator[Problem]:
    algorithm = run.config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator != "gdpo":
        return
    if not keys:
        yield error(
            "algorithm.gdpo_reward_keys",
            "algorithm.adv_estimator=gdpo normalises several rewards one by one and algorithm.gdpo_reward_keys is "
            "empty; name numbers that the reward function returns, e.g. [accuracy,format], or use grpo.",
        )
    elif weights is not None and len(weights) != len(keys):
        yield error(
            "algorithm.gdpo_reward_weights",
            f"algorithm.gdpo_reward_weights={weights} has {len(weights)} numbers for the {len(keys)} rewards of "
            f"algorithm.gdpo_reward_keys={keys}; give one for each.",
        )


def filtration_has_values(run: Checked) -> Iterator[Problem]:
    algorithm = run.config.algorithm
    if algorithm.use_pf_ppo and algorithm.adv_estimator not in ESTIMATORS_WITH_CRITIC:
        yield error(
            "algorithm.use_pf_ppo",
            "algorithm.use_pf_ppo=True draws rows by their score, which suits advantages from a critic's values, and "
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares rows; set algorithm.adv_estimator=gae, or "
            "use_pf_ppo=False.",
        )


def rejection_has_one_bound_per_rule(run: Checked) -> Iterator[Problem]:
    correction = run.config.algorithm.rollout_correction
    key = f"{CORRECTION}.rollout_rs_threshold"
    if correction.rollout_rs is None:
        return
    if correction.rollout_rs_threshold is None:
        yield error(key, f"{CORRECTION}.rollout_rs={correction.rollout_rs} needs bounds and {key} is not set; use 2.0.")
        return
    rules = [rule for rule in correction.rollout_rs.split(",") if rule.strip()]
    bounds = str(correction.rollout_rs_threshold).split(",")
    if len(bounds) not in (1, len(rules)):
        yield error(
            key,
            f"{key}={correction.rollout_rs_threshold} has {len(bounds)} bounds for the {len(rules)} rules of "
            f"{CORRECTION}.rollout_rs={correction.rollout_rs}; give one, or one per rule.",
        )
