"""Learning rate as a function of the number of steps taken, and how far a backend has trained. Steps no optimizer.

The whole state of the schedule is one integer, so a resumed run continues the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.backends.base import StepResult
from dovetail.config.optim import OptimConfig

NOT_TRAINABLE = "this backend was built without an optimizer; pass optim to build_backend to train it"


def learning_rate(step: int, config: OptimConfig, num_training_steps: int) -> float:
    """Rate of step number ``step`` (counted from 0) in a run of ``num_training_steps``.

    Warm-up rises linearly from ``lr_warmup_init``, so with a warm-up from 0 the very first step changes nothing (the
    convention of transformers). After the last step of the schedule the rate stays where it is.
    """
    warmup = config.warmup_steps(num_training_steps)
    if step < warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    end = config.lr_decay_steps or num_training_steps
    if end <= 0:
        raise ValueError(
            f"lr_scheduler_type={config.lr_scheduler_type} needs the length of the run: "
            f"set optim.total_training_steps (now {config.total_training_steps}) or optim.lr_decay_steps."
        )
    span = config.lr - config.lowest_lr
    return config.lowest_lr + span * _SHAPES[config.lr_scheduler_type](step, warmup, end, config)


class LearningRateSchedule:
    """Gives every parameter group of the optimizer the rate of the current step."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> None:
        self._optimizer = optimizer
        self._rate = rate
        self._num_steps = 0
        self._apply()

    @property
    def lr(self) -> float:
        """Rate the next optimizer step will use."""
        return self._rate(self._num_steps)

    @property
    def num_steps(self) -> int:
        """Steps of the schedule taken so far."""
        return self._num_steps

    def step(self) -> None:
        self._num_steps += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_steps = int(state["num_steps"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr


def _progress(step: int, warmup: int, end: int) -> float:
    return min(1.0, (step - warmup) / max(1, end - warmup))


def _cosine(step: int, warmup: int, end: int, config: OptimConfig) -> float:
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * _progress(step, warmup, end)))


def _linear(step: int, warmup: int, end: int, config: OptimConfig) -> float:
    return 1.0 - _progress(step, warmup, end)


def _inverse_square_root(step: int, warmup: int, end: int, config: OptimConfig) -> float:
    return math.sqrt(max(1, warmup) / max(1, warmup, min(step, end)))


def _warmup_stable_decay(step: int, warmup: int, end: int, config: OptimConfig) -> float:
    length = config.lr_wsd_decay_steps or max(1, (end - warmup) // 10)
    decayed = min(1.0, max(0.0, (step - (end - length)) / length))
    if config.lr_wsd_decay_style == "linear":
        return 1.0 - decayed
    if config.lr_wsd_decay_style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * decayed))
    # Halves falling from 1 to exactly 0, as Megatron's exponential style does.
    return 2.0 * 0.5**decayed - 1.0


_SHAPES: dict[str, Callable[[int, int, int, OptimConfig], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "inverse_square_root": _inverse_square_root,
    "wsd": _warmup_stable_decay,
}


class TrainingProgress:
    """What a backend's checkpoint holds beside weights and optimizer. Without a schedule the backend only infers."""

    def __init__(self, schedule: LearningRateSchedule | None) -> None:
        self._schedule = schedule
        self._num_skipped = 0
        self._any_taken = False

    def stepped(self, grad_norm: float, *, advance_schedule: bool) -> StepResult:
        """Count one step of the optimizer. A norm that is not finite says that it was skipped.

        The schedule advances where `advance_schedule` says that a training step ends, unless all optimizer steps of it
        were skipped.
        """
        assert self._schedule is not None, "backends with an optimizer have a schedule"
        lr = self._schedule.lr
        skipped = not math.isfinite(grad_norm)
        self._num_skipped += skipped
        self._any_taken = self._any_taken or not skipped
        if advance_schedule:
            if self._any_taken:
                self._schedule.step()
            self._any_taken = False
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
