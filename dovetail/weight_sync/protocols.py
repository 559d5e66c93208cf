"""The two sides of a weight sync, as Protocols. Anything with these methods takes part; nothing is inherited."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Full tensors under Hugging Face names, in any order. A tensor is valid until the next one is asked for."""


@runtime_checkable
class WeightSource(Protocol):
    """Who has the truth: a training backend (one process, FSDP, FSDP2, Megatron), or a folder.

    Collective where the weights are sharded: every rank must take every tensor.
    """

    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class WeightSink(Protocol):
    """Who receives: a rollout engine. A second update with the same weights must be harmless."""

    def update_weights(self, weights: NamedTensors, version: int) -> None: ...


@runtime_checkable
class SleepingSink(WeightSink, Protocol):
    """A sink that shares its device with training and gives its memory back in between."""

    def sleep(self, tags: Collection[Any] = ...) -> None: ...

    def wake(self, tags: Collection[Any] = ...) -> None: ...
