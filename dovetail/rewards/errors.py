"""What can go wrong with scoring. None of it is ever a score of 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["timeout", "crash", "exception", "bad_value", "cancelled", "tool_error", "infra", "aborted"]
"""The last three are outcomes of an agent's trajectory: it ended by no fault of the policy and was not scored."""


class RewardError(RuntimeError):
    """Scoring cannot start, or too many answers could not be scored."""


@dataclass(frozen=True)
class Failure:
    """Why one call gave no score. `detail` is a traceback or the last words of a dead process."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"
