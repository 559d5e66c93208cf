"""How good the model of a checkpoint was: one metric of the validation at its step, kept in its manifest.

Which checkpoint is the best is not stored anywhere: it is the one with the best score among those that are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

_ENTRY = "score"


@dataclass(frozen=True)
class Score:
    """`mode` says whether the largest or the smallest value of `metric` is the best."""

    metric: str
    value: float
    mode: Literal["max", "min"]

    def beats(self, other: Score) -> bool:
        """Whether it is strictly better; a score of something else is never in the way."""
        if (self.metric, self.mode) != (other.metric, other.mode):
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value

    def as_extra(self) -> dict[str, Any]:
        """The entry of a manifest's `extra`."""
        return {_ENTRY: asdict(self)}

    @classmethod
    def of_extra(cls, extra: Mapping[str, Any]) -> Score | None:
        return cls(**extra[_ENTRY]) if _ENTRY in extra else None


def score_of(metrics: Mapping[str, float], metric: str | None, mode: Literal["max", "min"]) -> Score | None:
    """None where the step was not validated, and for a value that is not a number."""
    value = math.nan if metric is None else metrics.get(metric, math.nan)
    return None if metric is None or math.isnan(value) else Score(metric, float(value), mode)


def best_step(scores: Mapping[int, Score]) -> int | None:
    """The step with the best score; of equal ones the first. What the newest score measures is what counts."""
    best: int | None = None
    for step in sorted(scores):
        newest = scores[max(scores)]
        comparable = (scores[step].metric, scores[step].mode) == (newest.metric, newest.mode)
        if comparable and (best is None or scores[step].beats(scores[best])):
            best = step
    return best
