"""What a Megatron weight is made of: pieces of Hugging Face tensors in a row, cut evenly over tensor-parallel ranks.

Every layout of this folder is that one sentence, so reading a rank's shard and putting all shards together again are
two short functions for all of them. Knows names and shapes; no model, no file, no process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

ReadSlice = Callable[[str, int | None, int, int], Tensor]
"""`read(name, dim, start, stop)`: that part of a tensor; all of it when `dim` is None."""


@dataclass(frozen=True)
class Piece:
    """`start:stop` of the tensor `name`, along the layout's dimension. Without a name: padding."""

    name: str | None
    start: int
    stop: int


@dataclass(frozen=True)
class ShardLayout(ABC):
    """Where the content of one Megatron weight comes from. `names` are Hugging Face names, ordered by the class."""

    names: tuple[str, ...]

    def under(self, prefix: str, *, expert: int | None = None) -> Self:
        """The same layout for the tensors of one layer (`model.layers.7.`), and of one expert of it."""
        names = (name if expert is None else name.format(expert=expert) for name in self.names)
        return replace(self, names=tuple(prefix + name for name in names))

    @property
    def dim(self) -> int | None:
        """The dimension that ranks share; None when every rank has all of it."""
        return 0

    @abstractmethod
    def pieces(self, length: int, parts: int) -> list[Piece]:
        """The whole weight, `length` long in `dim`, as pieces; each of `parts` ranks holds an equal stretch of it."""


@dataclass(frozen=True)
class Rows(ShardLayout):
    """A column-parallel weight: output features are shared."""

    def pieces(self, length: int, parts: int) -> list[Piece]:
        return [Piece(self.names[0], 0, length)]


@dataclass(frozen=True)
class Columns(Rows):
    """A row-parallel weight: input features are shared."""

    @property
    def dim(self) -> int | None:
        return 1


@dataclass(frozen=True)
class Whole(Rows):
    """A weight that every rank holds: norms, routers, the down-projections of latent attention."""

    @property
    def dim(self) -> int | None:
        return None


@dataclass(frozen=True)
class Vocabulary(ShardLayout):
    """Embedding or head: Megatron pads the vocabulary so that ranks can share it, files do not."""

    size: int

    def pieces(self, length: int, parts: int) -> list[Piece]:
        padding = [Piece(None, 0, length - self.size)] if length > self.size else []
        return [Piece(self.names[0], 0, self.size), *padding]


@dataclass(frozen=True)
class GateUp(ShardLayout):
    """Two projections in one: each rank holds its share of the gate, then its share of the other."""

    def pieces(self, length: int, parts: int) -> list[Piece]:
        share = length // (2 * parts)
        return [Piece(name, rank * share, (rank + 1) * share) for rank in range(parts) for name in self.names]


@dataclass(frozen=True)
class GroupedQkv(ShardLayout):
    """Queries, keys and values in one, weight or bias: for each group its queries, its key, its value.

    With more ranks than groups the cuts fall inside a group; Megatron's attention puts the groups together again.
    """

    groups: int
    query_rows: int
    key_rows: int

    def pieces(self, length: int, parts: int) -> list[Piece]:
        sizes = (self.query_rows, self.key_rows, self.key_rows)
        return [
            Piece(name, group * size, (group + 1) * size)
            for group in range(self.groups)
            for name, size in zip(self.names, sizes, strict=True)
        ]


def read_shard(layout: ShardLayout, shard: Tensor, read: ReadSlice, *, part: int, parts: int) -> None:
    """Fill `shard`, the `part`-th of `parts`, reading what it holds and nothing else."""
    if layout.dim is None:
        content = read(layout.names[0], None, 0, 0)
        _check_shape(layout.names[0], content, shard)
        shard.copy_(content)
        return
    own = shard.shape[layout.dim]
    first, filled = part * own, 0
    position = 0
    for piece in layout.pieces(own * parts, parts):
        size = piece.stop - piece.start
        low, high = max(first, position), min(first + own, position + size)
        if low < high:
            target = shard.narrow(layout.dim, low - first, high - low)
            if piece.name is None:
                target.zero_()
            else:
                start = piece.start + low - position
                content = read(piece.name, layout.dim, start, start + high - low)
                _check_shape(piece.name, content, target)
                target.copy_(content)
            filled += high - low
        position += size
    if position != own * parts:
        raise ValueError(
            f"{', '.join(layout.names)} make {position} rows or columns, and Megatron's weight has {own * parts} over "
            f"{parts} ranks; config.json does not describe these weights."
        )
    assert filled == own, f"{filled} of {own} were filled"


def merge_shards(layout: ShardLayout, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of a weight from all of its shards, in rank order."""
    if layout.dim is None:
        yield layout.names[0], shards[0]
        return
    full = shards[0] if len(shards) == 1 else torch.cat(list(shards), layout.dim)
    pieces: dict[str, list[Tensor]] = {name: [] for name in layout.names}
    position = 0
    for piece in layout.pieces(full.shape[layout.dim], len(shards)):
        size = piece.stop - piece.start
        if piece.name is not None:
            pieces[piece.name].append(full.narrow(layout.dim, position, size))
        position += size
    for name, parts in pieces.items():
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts, layout.dim)


def _check_shape(name: str, content: Tensor, target: Tensor) -> None:
    if tuple(content.shape) != tuple(target.shape):
        raise ValueError(
            f"{name} gives shape {tuple(content.shape)} where Megatron has {tuple(target.shape)}; config.json does not "
            "describe these weights."
        )
