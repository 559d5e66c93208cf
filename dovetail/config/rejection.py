"""`rollout_correction.rollout_rs` and its thresholds, read: which tokens or sequences a rule rejects."""

from __future__ import annotations

import math
from dataclasses import dataclass

REJECTION_RULES = tuple(
    f"{level}_{estimator}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for estimator in ("k1", "k2", "k3")
    # The largest k1 alone would miss tokens that err on the other side.
    if (level, estimator) != ("seq_max", "k1")
)


@dataclass(frozen=True)
class RejectionRule:
    """`<level>_<estimator>` and its bounds, in the units of the estimator; only k1 has a lower one."""

    name: str
    lower: float | None
    upper: float

    @property
    def level(self) -> str:
        return self.name.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        return self.name.rpartition("_")[2]


def rejection_rules(rollout_rs: str, threshold: float | str | None) -> list[RejectionRule]:
    """The rules, or a ValueError that says what is wrong with them or with their bounds."""
    names = list(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    unknown = [name for name in names if name not in REJECTION_RULES]
    if unknown or not names:
        named = ", ".join(unknown) or "nothing"
        raise ValueError(f"{named} is no rejection rule; use {', '.join(REJECTION_RULES)}.")
    if threshold is None:
        raise ValueError(f"{', '.join(names)} needs bounds; use 2.0, or 0.5_2.0.")
    specs = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        raise ValueError(f"there are {len(specs)} bounds for {len(names)} rules; give one, or one per rule.")
    return [_rule(name, spec) for name, spec in zip(names, specs * (len(names) // len(specs)), strict=True)]


def _rule(name: str, spec: str) -> RejectionRule:
    lower_text, _, upper_text = spec.rpartition("_")
    try:
        upper = float(upper_text)
        lower = float(lower_text) if lower_text else 1.0 / upper
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{spec} of {name} is neither a number nor lower_upper; use 2.0, or 0.5_2.0.") from None
    if not (lower > 0 and 0 < upper < math.inf):
        raise ValueError(f"{spec} of {name} is not positive and finite; use 2.0.")
    if not name.endswith("k1"):
        if lower_text:
            raise ValueError(f"{spec} is a range, and {name} takes one upper bound; use {upper:g}.")
        return RejectionRule(name, None, upper)
    if lower >= upper:
        raise ValueError(f"{spec} of {name} rejects everything: the range is {lower:g} to {upper:g}; use 0.5_2.0.")
    return RejectionRule(name, math.log(lower), math.log(upper))
