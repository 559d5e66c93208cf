"""What a generated task is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A question and its truth. Problems with the same `key` are the same: `3 + 4` and `4 + 3`."""

    question: str
    ground_truth: Any
    key: Hashable


@dataclass(frozen=True)
class Task:
    """A family of problems. `make(rng, level)` draws one; `levels` says what each level means."""

    name: str
    ability: str
    make: Callable[[random.Random, int], Problem]
    levels: tuple[str, ...]

    @property
    def data_source(self) -> str:
        """The name by which the reward rule is found."""
        return f"dovetail/{self.name}"
