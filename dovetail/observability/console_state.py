"""What the console knows about a run. Plain values; draws nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

REWARD_NAMES = ("critic/score/mean", "reward/score/mean", "critic/rewards/mean")
_HISTORY = 2000
# What a step costs: these do not contain each other.
_STEP_PARTS = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")


@dataclass
class ConsoleState:
    """Updated by the driver, read by the view."""

    title: str
    total_steps: int
    step: int = 0
    first_step: int = 0
    clock: Callable[[], float] = time.monotonic
    metrics: dict[str, float] = field(default_factory=dict)
    previous: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    validation: dict[str, float] = field(default_factory=dict)
    validation_step: int | None = None
    events: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    phase_name: str | None = None
    phase_start: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.step_end = self.phase_start = self.clock()
        self.timed_steps, self.timed_seconds = 0, 0.0

    def phase(self, name: str | None) -> None:
        self.phase_name = name
        self.phase_start = self.clock()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.step_end = step, self.clock()
        validation = {name: value for name, value in metrics.items() if _is_shown(name)}
        if validation:
            self.validation, self.validation_step = validation, step
        if any(not name.startswith("val-") for name in metrics):
            self.previous, self.metrics = self.metrics, dict(metrics)
        reward = self.reward
        if reward is not None and any(name in metrics for name in REWARD_NAMES):
            self.rewards.append(reward)
        if "timing_s/step" in metrics:
            self.timed_steps += 1
            self.timed_seconds += sum(metrics.get(name, 0.0) for name in _STEP_PARTS)

    def estimate(self) -> str | None:
        """After the first step: how long the others will take on this machine."""
        left = self.total_steps - self.step
        if self.timed_steps != 1 or left < 1:
            return None
        seconds = self.timed_seconds
        return f"one step took {seconds:.1f} s here, so the other {left} take {_about(seconds * left)}"

    def event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if kind == "resume":
            self.step = self.first_step = step
        # Of a validation the scores that count; the rest is in the files.
        core = {name.removeprefix("val-core/"): value for name, value in facts.items() if _is_shown(name)}
        details = ", ".join(f"{name} {_short(value)}" for name, value in (core or facts).items())
        self.events.append(f"step {step}: {kind.replace('_', ' ')}" + (f" ({details})" if details else ""))

    @property
    def reward(self) -> float | None:
        """Mean reward of the last step."""
        return next((self.metrics[name] for name in REWARD_NAMES if name in self.metrics), None)

    def seconds_left(self, now: float) -> float | None:
        """From the mean time of the steps of this process; starting up and the first validation come once."""
        if self.timed_steps < 1:
            return None
        expected = self.timed_seconds / self.timed_steps * (self.total_steps - self.step)
        return max(expected - (now - self.step_end), 0.0)


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_shown(name: str) -> bool:
    """The scores that count, under our names: `best@4`, not verl's `best@4/mean` beside it."""
    return name.startswith("val-core/") and "@" in name.rpartition("/")[2]
