"""Take padding out of a batch: `[B, T]` with a mask to one row `[1, N]` of sequences end to end.

Works on the host alone, before anything is sent to a device: what lengths and places are depends on values, and a
device would have to be waited for. What keeps sequences apart inside the one row is `PackedSegments`, which packed
attention reads. Rows that begin alike, as the responses to one prompt do, can share their beginning: it then stands in
the row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class SharedPrefixes:
    """What sequences see besides their own tokens, where the beginning of a sequence stands in the row only once."""

    spans: tuple[tuple[int, int], ...]
    """For each sequence where its prefix begins in the row, and its length: 0 where the sequence is whole."""
    index: Tensor
    """`[sum of key lengths]`: the places in the row of each sequence's prefix and own tokens, sequence by sequence."""
    lengths: tuple[int, ...]
    """Keys of each sequence: its prefix and its own tokens."""
    cu_seqlens: Tensor
    """`[num_sequences + 1]` int32 offsets of `lengths`."""


@dataclass(
    eq=False
)  # not frozen: compiled layers look at every field of a frozen one, and compile anew when it differs
class PackedSegments:
    """Where sequences begin and end in a packed row, and who shares the row.

    It travels as a keyword of the model call, so a layer recomputed by gradient checkpointing, possibly on autograd's
    own thread, sees the very same object; a global or a context variable would not be there.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host: the CPU loop needs them and must not wait for a device."""
    cu_seqlens: Tensor
    """`[num_sequences + 1]` int32 offsets on the model's device."""
    sp_group: dist.ProcessGroup | None = None
    """Ranks that hold consecutive slices of this row (Ulysses); `None` when this rank holds all of it."""
    shared: SharedPrefixes | None = None
    """Set when sequences share beginnings; `lengths` then count what each has of its own."""

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class PackedBatch:
    """A batch without padding. `N` counts the tokens of the row: the real ones, less those that stand in it once for
    several sequences, plus a tail when the row must divide by a number of ranks."""

    input_ids: Tensor
    """`[1, N]`"""
    position_ids: Tensor
    """`[1, N]`, or `[C, 1, N]` for models with several position axes."""
    segments: PackedSegments
    places: Tensor
    """`[B, T]`: where each token of the batch stands in the row; -1 for padding."""


def pack_batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    *,
    sp_group: dist.ProcessGroup | None = None,
    share_prefixes: bool = False,
) -> PackedBatch:
    """Pack the tokens where `attention_mask` is set; left, right or mixed padding, rows in order. All on the host.

    Positions count from 0 in every sequence unless given: `[B, T]`, or `[B, C, T]` for several axes. With `sp_group`
    the row gets a tail, a sequence of its own, up to a multiple of the group's size. With `share_prefixes` a row that
    begins like one before it has only the rest of its tokens in the row.
    """
    mask = attention_mask.bool()
    lengths = [n for n in mask.sum(1).tolist() if n]
    if not lengths:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} has no token set; a batch needs at least one.")
    if position_ids is None:
        position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)
    ids = input_ids[mask]
    positions = (position_ids.transpose(1, 2) if position_ids.dim() == 3 else position_ids)[mask]
    if share_prefixes:
        spans = _find_prefixes(ids.numpy(), positions.numpy(), lengths)
        if any(length for _, length in spans):
            return _pack_shared(ids, positions, lengths, spans, mask)
    places = _places(mask, torch.arange(len(ids)))
    tail = -sum(lengths) % (dist.get_world_size(sp_group) if sp_group is not None else 1)
    if tail:  # from 0, like any sequence, or transformers would take it for the end of the last one
        ids = torch.cat([ids, ids.new_zeros(tail)])
        of_tail = torch.arange(tail, dtype=positions.dtype)
        positions = torch.cat(
            [positions, of_tail.view(-1, *[1] * (positions.dim() - 1)).expand(-1, *positions.shape[1:])]
        )
        lengths.append(tail)
    segments = PackedSegments(tuple(lengths), _offsets(lengths), sp_group)
    return PackedBatch(ids.unsqueeze(0), _position_row(positions), segments, places)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _places(mask: Tensor, of_tokens: Tensor) -> Tensor:
    return torch.full(mask.shape, -1).masked_scatter_(mask, of_tokens)


def _position_row(positions: Tensor) -> Tensor:
    """`[N]` to `[1, N]`, or `[N, C]` to `[C, 1, N]`."""
    return positions.unsqueeze(0) if positions.dim() == 1 else positions.movedim(-1, 0).unsqueeze(1)


def _find_prefixes(ids: np.ndarray, positions: np.ndarray, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """For each sequence the number of one before it that begins alike, and how many tokens they share.

    All share with a sequence that is whole, the last such. One that shares little with it, as the first response to
    another prompt does under the same system message, is whole itself where that saves tokens in those that follow.
    """
    starts = [0, *accumulate(lengths)]

    def shared_with(first: int, second: int) -> int:
        most = min(lengths[first], lengths[second] - 1)  # a sequence keeps one token of its own at least
        a, b = slice(starts[first], starts[first] + most), slice(starts[second], starts[second] + most)
        same = (ids[a] == ids[b]) & (positions[a] == positions[b]).all(tuple(range(1, positions.ndim)))
        return most if same.all() else int(same.argmin())

    def saves(number: int) -> int:
        """Tokens that later sequences share with this one and not with `whole`."""
        total = 0
        for later in range(number + 1, len(lengths)):
            more = shared_with(number, later) - shared_with(whole, later)
            if more <= 0:
                break
            total += more
        return total

    whole = 0
    spans = [(0, 0)]
    for number in range(1, len(lengths)):
        shared = shared_with(whole, number)
        if shared <= saves(number):
            whole, shared = number, 0
        spans.append((whole, shared))
    return spans


def _pack_shared(
    ids: Tensor,
    positions: Tensor,
    lengths: Sequence[int],
    spans: Sequence[tuple[int, int]],
    mask: Tensor,
) -> PackedBatch:
    own = [length - shared for length, (_, shared) in zip(lengths, spans, strict=True)]
    starts = [0, *accumulate(own)]
    kept: list[np.ndarray] = []
    places: list[np.ndarray] = []
    first = 0
    for number, (length, (whole, shared)) in enumerate(zip(lengths, spans, strict=True)):
        kept.append(np.arange(first + shared, first + length))
        places.append(np.arange(starts[whole], starts[whole] + shared))
        places.append(np.arange(starts[number], starts[number + 1]))
        first += length
    in_row, index = (torch.from_numpy(np.concatenate(parts)) for parts in (kept, places))
    of_row = tuple((starts[whole], shared) for whole, shared in spans)
    prefixes = SharedPrefixes(of_row, index, tuple(lengths), _offsets(lengths))
    segments = PackedSegments(tuple(own), _offsets(own), shared=prefixes)
    return PackedBatch(ids[in_row].unsqueeze(0), _position_row(positions[in_row]), segments, _places(mask, index))
