"""Check a stream of weights against what an engine's model needs. Names every tensor that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """Names and shapes one model takes. `ties` maps a name to the one that stands for both: either is enough.

    `optional` may come and need not: buffers that a checkpoint holds and nothing trains.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class WeightAccount:
    """Checks the tensors of one update off against what is expected."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self._expected = expected
        self._missing = {expected.ties.get(name, name) for name in expected.shapes}

    def problem_with(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why this tensor cannot be taken; None counts it as arrived."""
        wanted = self._expected.shapes.get(name, self._expected.optional.get(name))
        if wanted is None:
            return f"the engine's model has no tensor {name!r} (shape {tuple(shape)})."
        if tuple(shape) != tuple(wanted):
            return f"tensor {name!r} has shape {tuple(shape)}; the engine's model has it with shape {tuple(wanted)}."
        self._missing.discard(self._expected.ties.get(name, name))
        return None

    def missing(self) -> str | None:
        """What never arrived; None when the update is complete."""
        if not self._missing:
            return None
        names = sorted(self._missing)
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"no tensor was given for {', '.join(names[:_MAX_NAMED])}{more}."
