"""What a check of several keys may look at, and the arithmetic that checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dovetail.config.errors import Problem
from dovetail.config.plan.layout import RoleLayout
from dovetail.config.plan.model_shape import ModelShape
from dovetail.config.plan.placement import make_layouts
from dovetail.config.root import DovetailConfig

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class Checked:
    """A config under examination, with the policy's shape where its `config.json` is at hand."""

    config: DovetailConfig
    shape: ModelShape | None
    layouts: dict[str, RoleLayout] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DovetailConfig, shape: ModelShape | None) -> Checked:
        return cls(config, shape, make_layouts(config))

    @property
    def longest(self) -> int:
        """Longest prompt + response, in tokens."""
        rollout = self.config.actor_rollout_ref.rollout
        return rollout.prompt_length + rollout.response_length


Check = Callable[[Checked], Iterator[Problem]]


def error(key: str, message: str) -> Problem:
    """Something that cannot run, or would do something else than asked."""
    return Problem(key, message)


def warning(key: str, message: str) -> Problem:
    """Something that runs and is surely not what was meant."""
    return Problem(key, message, "warning")


def divides(layout: RoleLayout) -> bool:
    """Whether the role's parallel sizes multiply up to its world; other checks rely on it."""
    if layout.role == "rollout":
        engine = layout.world_size // max(1, layout.num_engines or 1)
        return layout.world_size % engine == 0
    if layout.backend == "single":
        return True
    ranks = layout.tensor_parallel * layout.pipeline_parallel * layout.ranks_per_sequence
    return layout.world_size % ranks == 0


def nearest_divisor(number: int, wanted: int) -> int:
    """The largest divisor of `number` that is at most `wanted`."""
    return next(size for size in range(min(wanted, number), 0, -1) if number % size == 0)


def next_multiple(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step
