"""`algorithm.*`: advantages, KL in the reward, group filtering, correction of the engine's log-probs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dovetail.config.actor import KLEstimator
from dovetail.config.base import Section

REJECTION_RULES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
ESTIMATORS_WITH_CRITIC = frozenset({"gae"})
OPTIMAL_TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})


class KLControlConfig(Section):
    """Coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="Constant, or steered towards `target_kl`.")
    kl_coef: float = Field(0.001, ge=0, description="First value of the coefficient.")
    horizon: int = Field(10000, ge=1, description="Speed of the adaptive controller, in sequences.")
    target_kl: float = Field(0.1, gt=0, description="KL that the adaptive controller aims at.")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): drop prompts whose answers all score the same."""

    enable: bool = Field(False, description="Filter groups and generate until the batch is full.")
    metric: str | None = Field(None, description="Score compared in a group: acc, score, seq_reward, seq_final_reward.")
    max_num_gen_batches: int = Field(0, ge=0, description="Generation batches per step before it stops; 0: no limit.")


class PFPPOConfig(Section):
    """Policy filtration: how the batch is drawn again by score."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        "pow", description="Chance of a row: a power of its score, only the best and worst, or the best four times."
    )
    weight_pow: float = Field(2.0, ge=0, description="Exponent of `pow`.")


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the engine's and the trainer's log-probs."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="Importance weights per token or per sequence. Null: none."
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="Weights are cut at this value.")
    rollout_is_threshold_lower: float | None = Field(
        None, gt=0, description="Drop weights below this and above `rollout_is_threshold` instead. Null: cut only."
    )
    rollout_is_batch_normalize: bool = Field(False, description="Scale the weights to a mean of 1 over the batch.")
    rollout_rs: str | None = Field(
        None,
        description="Rejection: comma-separated token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2..k3. "
        "Null: none.",
    )
    rollout_rs_threshold: float | str | None = Field(
        None, description="Bounds of the rejection, one per rule, comma-separated: `upper` or `lower_upper`."
    )
    bypass_mode: bool = Field(False, description="Take the engine's log-probs as the old log-probs.")
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        "ppo_clip",
        description="Loss with `bypass_mode`: ppo_clip is `actor.policy_loss.loss_mode` with the engine as the old "
        "policy; reinforce has no ratio, and weights it by `rollout_is`.",
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

    adv_estimator: str = Field(
        "gae",
        description="gae, grpo, grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo, opo, gpg, "
        "gdpo, optimal_token_baseline, tir_optimal_token_baseline; other names need `trainer.import_modules`.",
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of future rewards.")
    lam: float = Field(1.0, ge=0, le=1, description="Lambda of GAE.")
    norm_adv_by_std_in_grpo: bool = Field(True, description="Divide by the group's standard deviation (not Dr. GRPO).")
    gdpo_reward_keys: list[str] = Field(
        [], description="Numbers of the reward function's result that `gdpo` normalises one by one. Empty: the score."
    )
    gdpo_reward_weights: list[float] | None = Field(None, description="One weight for each of them. Null: all 1.")
    use_kl_in_reward: bool = Field(False, description="Subtract the KL to the reference model from the reward.")
    kl_penalty: KLEstimator = Field("kl", description="Estimator of that KL.")
    kl_ctrl: KLControlConfig = Field(KLControlConfig.model_construct(), description="Coefficient of that KL.")
    use_pf_ppo: bool = Field(
        False, description="PF-PPO: after the advantages, draw the batch again with chances by score."
    )
    pf_ppo: PFPPOConfig = Field(PFPPOConfig.model_construct(), description="How that is drawn.")
    filter_groups: FilterGroupsConfig = Field(FilterGroupsConfig.model_construct(), description="Dynamic sampling.")
    filter_truncated: bool = Field(
        False, description="Leave answers that hit the length limit out of the loss (overlong filtering)."
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        RolloutCorrectionConfig.model_construct(), description="Correction of the engine's log-probs."
    )
