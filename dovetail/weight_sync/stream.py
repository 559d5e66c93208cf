"""Streams of weights from a trainer: always read to the end, and cast to the engine's dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Full tensors under Hugging Face names, in any order. A tensor is valid until the next one is asked for."""

# Matrices that engines keep in float32 beside half-precision weights: routers of experts, state-space decays.
_FULL_PRECISION = re.compile(r"(?:^|[._])(?:gate|router|A_log)(?:\.weight)?$")


class GatheredWeights:
    """A stream that can be read on after a reader has given up, and knows whether it failed itself.

    Gathering is collective: a rank that stops half-way leaves the other ranks in a collective until it times out.
    """

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = iter(weights)
        self.failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise

    def drain(self) -> None:
        """Take what nobody has taken yet. A source that failed gives nothing more."""
        if not self.failed:
            for _ in self:
                pass


def in_engine_dtype(weights: NamedTensors, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Round matrices to what the engine holds (None: not known), so that no more bytes travel than it keeps.

    Engines round the same way when they load, so they end with the same bits. What they keep in full precision, and
    vectors, which weigh nothing, travel as they are.
    """
    if dtype is None:
        yield from weights
        return
    held: torch.dtype = getattr(torch, dtype)
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.itemsize > held.itemsize:
            tensor = tensor if _FULL_PRECISION.search(name) else tensor.detach().to(held)
        yield name, tensor
