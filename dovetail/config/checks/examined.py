"""What a check of several keys may look at, and how it says what it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from dovetail.config.base import look_up
from dovetail.config.errors import Problem, Severity
from dovetail.config.plan.layout import make_layouts
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.root import DovetailConfig

_SHORT = {name: f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model")}
_SHORT["correction"] = "algorithm.rollout_correction"
_NAME = re.compile(r"<([a-z_]+(?:\.\w+)+)>|@([a-z_]+(?:\.\w+)+)")


class Examined:
    """A config under examination, with the policy's shape where its `config.json` is at hand."""

    def __init__(self, config: DovetailConfig, shape: ModelShape | None) -> None:
        self.config, self.shape = config, shape
        self.data, self.algorithm, self.trainer = config.data, config.algorithm, config.trainer
        policy = config.actor_rollout_ref
        self.actor, self.rollout, self.model = policy.actor, policy.rollout, policy.model
        self.layouts = make_layouts(config)
        self.longest = config.longest_sequence
        """Longest row, in tokens."""

    def value(self, name: str) -> Any:
        """The value of a key or section; `rollout.n` is `actor_rollout_ref.rollout.n`."""
        return look_up(self.config, "", _full(name))

    def error(self, message: str, key: str = "") -> Problem:
        """Something that cannot run, or would do something else than asked. See `warning` for the message."""
        return self._problem(message, key, "error")

    def warning(self, message: str, key: str = "") -> Problem:
        """Something that runs and is surely not what was meant.

        In the message `<rollout.n>` stands for `actor_rollout_ref.rollout.n=8` and `@rollout.n` for the name alone; it
        is reported at `key`, or else at the first key that the message names.
        """
        return self._problem(message, key, "warning")

    def _problem(self, message: str, key: str, severity: Severity) -> Problem:
        names = [value or name for value, name in _NAME.findall(message)]
        text = _NAME.sub(lambda m: f"{_full(m[1])}={self.value(m[1])}" if m[1] else _full(m[2]), message)
        return Problem(_full(key or names[0]), text, severity)


def _full(name: str) -> str:
    section, _, rest = name.partition(".")
    return f"{_SHORT.get(section, section)}.{rest}"


Findings = Iterator[Problem]
Check = Callable[[Examined], Findings]


def nearest_divisor(number: int, wanted: int) -> int:
    """The largest divisor of `number` that is at most `wanted`; 1 of 0."""
    return next((size for size in range(min(wanted, number), 0, -1) if number % size == 0), 1)


def next_multiple(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step
