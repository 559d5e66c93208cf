"""Check that the estimator, loss and trackers named by a run are registered, and that their arguments will be there."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.config.signatures import missing_arguments
from dovetail.observability.tracker import check_logger_names

_ALWAYS = (
    *("token_level_rewards", "token_level_scores", "response_mask", "responses", "prompts", "reward_failed"),
    *("input_ids", "attention_mask", "position_ids", "rollout_log_probs", "weight_version"),
    *("uid", "index", "finish_reason", "gamma", "lam", "norm_adv_by_std_in_grpo", "num_repeat"),
    *("config", "batch", "non_tensor_batch"),
)


def refuse_unmet_names(config: DovetailConfig, dataset_columns: Iterable[str]) -> None:
    """Raise `ConfigError` for a name that nothing registered, or an estimator that names a column of no stage."""
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    problems: list[Problem] = []
    for key, name, find in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, get_adv_estimator_fn),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, get_policy_loss_fn),
    ):
        try:
            function = find(name)
        except ValueError as error:
            modules = ", ".join(config.trainer.import_modules)
            problems.append(
                Problem(key, f"{key}={name}: {error} trainer.import_modules ({modules}) registers no other.")
            )
            continue
        if key == "algorithm.adv_estimator" and (lacking := _lacking(function, config, dataset_columns)):
            problems.append(Problem(key, lacking))
    try:
        check_logger_names(config.trainer.loggers)
    except ValueError as error:
        problems.append(Problem("trainer.logger", str(error)))
    if problems:
        raise ConfigError(problems)


def estimator_columns(config: DovetailConfig) -> list[str]:
    """The columns and settings that an estimator may name in this run, beside those of the data set."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    optional = {
        "values": config.uses_critic,
        "old_log_probs": config.needs_old_log_probs,
        "entropys": config.has_log_prob_pass,
        "sum_pi_squared": config.needs_sum_pi_squared,
        "ref_log_prob": config.uses_reference,
        "reward_baselines": algorithm.adv_estimator == "remax",
        "rollout_is_weights": correction.rollout_is is not None and config.has_log_prob_pass,
        "rm_scores": config.reward_model.enable,
        "reward_components": algorithm.adv_estimator == "gdpo",
        "gdpo_reward_weights": True,
    }
    return [*_ALWAYS, *(name for name, there in optional.items() if there)]


_HOW = {
    "values": "critic.enable=True",
    "old_log_probs": "actor_rollout_ref.actor.calculate_sum_pi_squared=True, which makes the actor compute them",
    "entropys": "actor_rollout_ref.actor.calculate_sum_pi_squared=True, which makes the actor compute them",
    "sum_pi_squared": "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
    "ref_log_prob": "actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
    "rollout_is_weights": "algorithm.rollout_correction.rollout_is=token",
    "rm_scores": "reward_model.enable=True",
}


def _lacking(estimate: object, config: DovetailConfig, dataset_columns: Iterable[str]) -> str | None:
    assert callable(estimate), "the registry holds functions"
    available = estimator_columns(config)
    missing = missing_arguments(estimate, [*available, *dataset_columns])
    if not missing:
        return None
    hints = [f"{name} is there with {_HOW[name]}" for name in missing if name in _HOW]
    advice = "; ".join(hints) or "give it a default, e.g. None, if the reward function returns it"
    return (
        f"algorithm.adv_estimator={config.algorithm.adv_estimator} asks for {', '.join(missing)}, which no stage of "
        f"this run writes. {advice[0].upper()}{advice[1:]}. It may name "
        f"{', '.join(available)}, and columns of the data set."
    )
