"""`algorithm.*`: advantages, KL in the reward, group filtering, correction of the engine's log-probs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import field_validator

from dovetail.config.actor import KLEstimator
from dovetail.config.base import Rule, Section, all_of, key, read_with, section, unsupported, unused, when_is, when_not
from dovetail.config.names import ADV_ESTIMATORS

REJECTION_RULES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
ESTIMATORS_WITH_CRITIC = frozenset({"gae"})
OPTIMAL_TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})


_KL_IN_REWARD = read_with("algorithm.use_kl_in_reward", True, unless=(0,))


def _of_estimator(*names: str) -> Rule:
    """Read by these built-in estimators. One that a user registers may read any key."""
    return read_with("algorithm.adv_estimator", *names, known=ADV_ESTIMATORS)


class KLControlConfig(Section):
    """Coefficient of the KL in the reward."""

    rules: ClassVar[tuple[Rule, ...]] = (read_with(".type", "adaptive", only="horizon target_kl"),)

    type: Literal["fixed", "adaptive"] = key("fixed", "Constant, or steered towards `target_kl`.")
    kl_coef: float = key(0.001, "First value of the coefficient.", ge=0)
    horizon: int = key(10000, "Speed of the adaptive controller, in sequences.", ge=1)
    target_kl: float = key(0.1, "KL that the adaptive controller aims at.", gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): drop prompts whose responses all score the same."""

    rules: ClassVar[tuple[Rule, ...]] = (read_with(".enable", True, only="metric max_num_gen_batches"),)

    enable: bool = key(False, "Filter groups and generate until the batch is full.")
    metric: str | None = key(None, "Score compared in a group: acc, score, seq_reward, seq_final_reward.")
    max_num_gen_batches: int = key(0, "Generation batches per step before it stops; 0: no limit.", ge=0)


class PFPPOConfig(Section):
    """Policy filtration: how the batch is drawn again by score."""

    reweight_method: Literal["pow", "max_min", "max_random"] = key(
        "pow", "Chance of a row: a power of its score, only the best and worst, or the best four times."
    )
    weight_pow: float = key(2.0, "Exponent of `pow`.", ge=0, rules=read_with(".reweight_method", "pow"))


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the engine's and the trainer's log-probs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        unused("{section}.rollout_is makes no weights", when_is("rollout_is", None), only="rollout_is_threshold*"),
        unused(
            "{section}.rollout_is makes no weights",
            all_of(when_is("rollout_is", None), when_is("bypass_mode", False)),
            only="rollout_is_batch_normalize",
        ),
    )

    rollout_is: Literal["token", "sequence"] | None = key(
        None, "Importance weights per token or per sequence. Null: none."
    )
    rollout_is_threshold: float = key(2.0, "Weights are cut at this value.", gt=0)
    rollout_is_threshold_lower: float | None = key(
        None, "Drop weights below this and above `rollout_is_threshold` instead. Null: cut only.", gt=0
    )
    rollout_is_batch_normalize: bool = key(
        False,
        "Scale the weights to a mean of 1 over the batch.",
        rules=unsupported(
            "bypass mode makes weights micro-batch by micro-batch and knows no mean over the batch; use False",
            when=when_is("bypass_mode", True),
        ),
    )
    rollout_rs: str | None = key(
        None, "Rejection: comma-separated token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2..k3. Null: none."
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "Bounds of the rejection, one per rule, comma-separated: `upper` or `lower_upper`.",
        rules=unused("{section}.rollout_rs names no rule", when_is("rollout_rs", None)),
    )
    bypass_mode: bool = key(False, "Take the engine's log-probs as the old log-probs.")
    loss_type: Literal["ppo_clip", "reinforce"] = key(
        "ppo_clip",
        "Loss with `bypass_mode`: ppo_clip is `actor.policy_loss.loss_mode` with the engine as the old "
        "policy; reinforce has no ratio, and weights it by `rollout_is`.",
        rules=(
            unused(
                "without `bypass_mode` `actor_rollout_ref.actor.policy_loss.loss_mode` chooses the loss",
                when_is("bypass_mode", False),
            ),
            unsupported(
                "it asks for another loss than "
                "actor_rollout_ref.actor.policy_loss.loss_mode={actor_rollout_ref.actor.policy_loss.loss_mode}; set "
                "one of the two",
                "reinforce",
                when=when_not("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla", "reinforce"),
            ),
        ),
    )

    @field_validator("rollout_rs")
    @classmethod
    def _rules_exist(cls, value: str | None) -> str | None:
        unknown = [rule for rule in (value or "").split(",") if value and rule.strip() not in REJECTION_RULES]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no rejection rule; use {', '.join(REJECTION_RULES)}.")
        return value

    @property
    def rejection_rules(self) -> tuple[str, ...]:
        """The rejection rules in order."""
        return tuple(rule.strip() for rule in self.rollout_rs.split(",")) if self.rollout_rs else ()

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

    adv_estimator: str = key(
        "gae",
        "gae, grpo, grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo, opo, gpg, "
        "gdpo, optimal_token_baseline, tir_optimal_token_baseline; other names need `trainer.import_modules`.",
    )
    gamma: float = key(
        1.0, "Discount of future rewards.", ge=0, le=1, rules=_of_estimator("gae", "reinforce_plus_plus")
    )
    lam: float = key(1.0, "Lambda of GAE.", ge=0, le=1, rules=_of_estimator("gae"))
    turn_discount: float = key(
        1.0,
        "Discount of rewards from one turn of an agent to the next: the reward of turn t counts `turn_discount`^t.",
        gt=0,
        le=1,
        rules=unused("a response is one turn", when_is("actor_rollout_ref.rollout.uses_agents", False)),
    )
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "Divide by the group's standard deviation (not Dr. GRPO).",
        rules=_of_estimator("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
    )
    gdpo_reward_keys: list[str] = key(
        [],
        "Numbers of the reward function's result that `gdpo` normalises one by one. Empty: the score.",
        rules=read_with("algorithm.adv_estimator", "gdpo"),
    )
    gdpo_reward_weights: list[float] | None = key(
        None, "One weight for each of them. Null: all 1.", rules=_of_estimator("gdpo")
    )
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference model from the reward.")
    kl_penalty: KLEstimator = key("kl", "Estimator of that KL.", rules=_KL_IN_REWARD)
    kl_ctrl: KLControlConfig = section(KLControlConfig, "Coefficient of that KL.", rules=_KL_IN_REWARD)
    use_pf_ppo: bool = key(False, "PF-PPO: after the advantages, draw the batch again with chances by score.")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "How that is drawn.", rules=read_with("algorithm.use_pf_ppo", True))
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling.")
    filter_truncated: bool = key(
        False, "Leave responses that hit the length limit out of the loss (overlong filtering)."
    )
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "Correction of the engine's log-probs."
    )
