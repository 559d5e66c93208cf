"""Weights on their way to servers, checked before they are sent. Sends nothing.

vLLM and SGLang pass over a tensor they do not know, and SGLang dies of one with another shape. Both are found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from torch import Tensor

from dovetail.rollout.base import WeightUpdateError
from dovetail.weight_sync import ExpectedWeights, GatheredWeights, NamedTensors, WeightAccount


class CheckedWeights:
    """The tensors that fit, until one does not. The source is read to its end even so, and WeightUpdateError is raised
    there: gathering a sharded source is collective, so a rank that stops early leaves the others in a collective. As a
    context manager it reads the source to its end when the update fails in between. A tied tensor goes once, under the
    one name that engines load it by."""

    def __init__(self, weights: NamedTensors, expected: ExpectedWeights) -> None:
        self._weights = GatheredWeights(weights)
        self._ties = expected.ties
        self._account = WeightAccount(expected)
        self._sent: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        problem: str | None = None
        for name, tensor in self._weights:
            problem = problem or self._account.problem_with(name, tuple(tensor.shape))
            own = self._ties.get(name, name)
            if problem is None and own not in self._sent:
                self._sent.add(own)
                yield own, tensor.detach()
        problem = problem or self._account.gap()
        if problem is not None:
            raise WeightUpdateError(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self._weights.drain()
