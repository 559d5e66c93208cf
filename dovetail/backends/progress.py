"""How far a backend has trained: its learning-rate schedule and the steps it skipped. Steps no optimizer itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.backends.base import StepResult
from dovetail.backends.schedule import LearningRateSchedule

NOT_TRAINABLE = "this backend was built without an optimizer; pass optim to build_backend to train it"


class TrainingProgress:
    """What a backend's checkpoint holds beside weights and optimizer. Without a schedule the backend only infers."""

    def __init__(self, schedule: LearningRateSchedule | None) -> None:
        self._schedule = schedule
        self._num_skipped = 0

    @property
    def has_schedule(self) -> bool:
        return self._schedule is not None

    def stepped(self, grad_norm: float, *, advance_schedule: bool) -> StepResult:
        """Count one step of the optimizer. A norm that is not finite says that it was skipped."""
        if self._schedule is None:
            raise RuntimeError(NOT_TRAINABLE)
        lr = self._schedule.lr
        skipped = not math.isfinite(grad_norm)
        if skipped:
            self._num_skipped += 1
        elif advance_schedule:
            self._schedule.step()
        return StepResult(grad_norm=grad_norm, skipped=skipped, lr=lr, num_skipped=self._num_skipped)

    def pack(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """What goes into a checkpoint, with the caller's own ``extra``."""
        own = {
            "schedule": self._schedule.state_dict() if self._schedule is not None else None,
            "num_skipped": self._num_skipped,
        }
        return {"backend": own, "extra": dict(extra or {})}

    def unpack(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Go on from what ``pack`` gave; return the caller's ``extra``. None: the checkpoint was read without it."""
        if saved is None:
            return {}
        own = saved["backend"]
        if self._schedule is not None and own["schedule"] is not None:
            self._schedule.load_state_dict(own["schedule"])
        self._num_skipped = own["num_skipped"]
        return saved["extra"]
