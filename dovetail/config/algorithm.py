"""`algorithm.*`: advantages, KL in the reward, group filtering, correction of the engine's log-probs."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from dovetail.config.actor import KLEstimator
from dovetail.config.base import Rule, Section, all_of, key, read_with, section, unsupported, unused, when_is, when_not
from dovetail.config.names import ADV_ESTIMATORS, listed
from dovetail.config.rejection import rejection_rules

ESTIMATORS_WITH_CRITIC = frozenset({"gae"})
OPTIMAL_TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})


GDPO_READS = "adv_estimator gdpo reads the numbers of gdpo_reward_keys as the reward function returns them"
_VECTORIZED = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_NO_WEIGHTS, _without_weights = "{section}.rollout_is makes no weights", when_is("rollout_is", None)


def _of_estimator(keys: str, *names: str) -> Rule:
    """`keys` are read by these built-in estimators. One that a user registers may read any key."""
    return read_with("algorithm.adv_estimator", *names, known=ADV_ESTIMATORS, only=keys)


class KLControlConfig(Section):
    """Coefficient of the KL in the reward."""

    rules = (read_with(".type", "adaptive", only="horizon target_kl"),)

    type: Literal["fixed", "adaptive"] = key("fixed", "Constant, or steered towards `target_kl`.")
    kl_coef: float = key(0.001, "First value of the coefficient.", was="coeff", ge=0)
    horizon: int = key(10000, "Speed of the adaptive controller, in sequences.", ge=1)
    target_kl: float = key(0.1, "KL that the adaptive controller aims at.", gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): drop prompts whose responses all score the same."""

    rules = (read_with(".enable", True, only="metric max_num_gen_batches"),)

    enable: bool = key(False, "Filter groups and generate until the batch is full.")
    metric: str | None = key(None, "Score compared in a group: acc, score, seq_reward, seq_final_reward.")
    max_num_gen_batches: int = key(
        0, "Generation batches per step, after which groups without signal fill it up; 0: no limit.", ge=0
    )


class PFPPOConfig(Section):
    """Policy filtration: how the batch is drawn again by score."""

    reweight_method: Literal["pow", "max_min", "max_random"] = key(
        "pow", "Chance of a row: a power of its score, only the best and worst, or the best four times."
    )
    weight_pow: float = key(2.0, "Exponent of `pow`.", ge=0, rules=read_with(".reweight_method", "pow"))


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the engine's and the trainer's log-probs."""

    rules = (
        unused(_NO_WEIGHTS, _without_weights, only="rollout_is_threshold*"),
        unused(_NO_WEIGHTS, all_of(_without_weights, when_is("bypass_mode", False)), only="rollout_is_batch_normalize"),
        unused("{section}.rollout_rs names no rule", when_is("rollout_rs", None), only="rollout_rs_threshold"),
        read_with(".bypass_mode", True, only="loss_type"),
        unsupported(
            "bypass mode knows no mean over the batch; use False",
            when=when_is("bypass_mode", True),
            only="rollout_is_batch_normalize",
        ),
        unsupported(
            f"it asks for another loss than {_LOSS_MODE}={{{_LOSS_MODE}}}; set one of the two",
            "reinforce",
            when=when_not(_LOSS_MODE, "vanilla", "reinforce"),
            only="loss_type",
        ),
    )

    rollout_is: Literal["token", "sequence"] | None = key(None, "Importance weights per token or sequence. Null: none.")
    rollout_is_threshold: float = key(2.0, "Weights are cut at this value.", gt=0)
    rollout_is_threshold_lower: float | None = key(
        None, "Drop weights below this and above `rollout_is_threshold` instead. Null: cut only.", gt=0
    )
    rollout_is_batch_normalize: bool = key(False, "Scale the weights to a mean of 1 over the batch.")
    rollout_rs: str | None = key(
        None, "Rejection, by commas: token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3."
    )
    rollout_rs_threshold: float | str | None = key(None, "Bounds, one per rule: `upper` or `lower_upper`.")
    bypass_mode: bool = key(False, "Take the engine's log-probs as the old ones.", was="bypass_old_logprob_for_rollout")
    loss_type: Literal["ppo_clip", "reinforce"] = key(
        "ppo_clip",
        "Loss with `bypass_mode`: ppo_clip is `actor.policy_loss.loss_mode` with the engine as the old "
        "policy; reinforce has no ratio, and weights it by `rollout_is`.",
    )

    @field_validator("rollout_rs")
    @classmethod
    def _rules_exist(cls, value: str | None) -> str | None:
        if value:
            rejection_rules(value, 2.0)
        return value

    @property
    def weight_threshold(self) -> float | str:
        """Where weights are cut, or `lower_upper` outside of which they are dropped."""
        lower = self.rollout_is_threshold_lower
        return self.rollout_is_threshold if lower is None else f"{lower}_{self.rollout_is_threshold}"

    @property
    def active(self) -> bool:
        """Whether the engine's log-probs are needed."""
        return self.rollout_is is not None or self.rollout_rs is not None or self.bypass_mode


class AlgorithmConfig(Section):
    """Advantages and rewards."""

    rules = (
        _of_estimator("gamma", "gae", "reinforce_plus_plus"),
        _of_estimator("lam", "gae"),
        _of_estimator("norm_adv_by_std_in_grpo", "grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
        _of_estimator("gdpo_reward_weights", "gdpo"),
        read_with("algorithm.adv_estimator", "gdpo", only="gdpo_reward_keys"),
        unused(GDPO_READS, when_is("algorithm.adv_estimator", "gdpo"), only="use_kl_in_reward turn_discount"),
        read_with("algorithm.use_kl_in_reward", True, unless=(0,), only="kl_penalty kl_ctrl.*"),
        read_with("algorithm.use_pf_ppo", True, only="pf_ppo.*"),
        unused("a response is one turn", when_is("actor_rollout_ref.rollout.uses_agents", False), only="turn_discount"),
    )

    adv_estimator: str = key("gae", listed(ADV_ESTIMATORS), reads=_VECTORIZED)
    gamma: float = key(1.0, "Discount of future rewards.", ge=0, le=1)
    lam: float = key(1.0, "Lambda of GAE.", ge=0, le=1)
    turn_discount: float = key(1.0, "The reward of an agent's turn t counts `turn_discount`^t.", gt=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide by the group's standard deviation (not Dr. GRPO).")
    gdpo_reward_keys: list[str] = key([], "Numbers of the reward function's result that `gdpo` normalises one by one.")
    gdpo_reward_weights: list[float] | None = key(None, "One weight for each of them. Null: all 1.")
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference model from the reward.")
    kl_penalty: KLEstimator = key("kl", "Estimator of that KL.")
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = key(False, "PF-PPO: after the advantages, draw the batch again with chances by score.")
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    filter_truncated: bool = key(False, "Leave responses that hit the length limit out of the loss.")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
