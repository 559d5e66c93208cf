"""`dpo.*` and `reward_training.*`: training on preferences, of a policy or of a reward model."""

from __future__ import annotations

from typing import Literal

from dovetail.config.base import Section, key, read_with


class DPOConfig(Section):
    """The loss of `dovetail dpo`."""

    rules = (
        read_with(".loss_type", "kto", only="desirable_weight undesirable_weight"),
        read_with(".loss_type", "simpo", only="simpo_gamma"),
        read_with(".loss_type", "sigmoid", "simpo", only="label_smoothing"),
    )

    loss_type: Literal["sigmoid", "ipo", "kto", "orpo", "simpo"] = key(
        "sigmoid", "sigmoid is DPO itself. orpo and simpo need no reference; kto also takes rows with one label each."
    )
    beta: float = key(
        0.1,
        "How closely the policy is held to the reference; with simpo the scale of rewards, with orpo the weight "
        "of the odds ratio.",
        gt=0,
    )
    label_smoothing: float = key(0.0, "Share of pairs taken to be labelled the wrong way round.", ge=0, lt=0.5)
    simpo_gamma: float = key(0.5, "By how much the chosen reward should be above the rejected one.", ge=0)
    desirable_weight: float = key(1.0, "Weight of good responses.", gt=0)
    undesirable_weight: float = key(1.0, "Weight of bad responses.", gt=0)


class RewardTrainingConfig(Section):
    """The loss of `dovetail reward`."""

    center_coefficient: float = key(
        0.0, "Weight of the squared sum of a pair's scores, which keeps them around 0.", ge=0
    )
