"""Take padding out of a batch and put it back: `[B, T]` with a mask to one row `[1, N]` of sequences end to end.

Only indices and copies; works on any device, needs no attention library, and is differentiable. What keeps sequences
apart inside the one row is `PackedSegments`, which packed attention reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def offsets(self) -> list[int]:
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets


@dataclass(frozen=True)
class PackedBatch:
    """A batch without padding. `N` counts real tokens, plus a tail when the row must divide by a number of ranks."""

    input_ids: Tensor
    """`[1, N]`"""
    position_ids: Tensor
    """`[1, N]`, or `[C, 1, N]` for models with several position axes."""
    segments: PackedSegments
    indices: Tensor
    """`[num_tokens]`: place of each real token in the flattened `[B * T]` batch."""
    shape: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        return self.indices.numel()

    def pack(self, x: Tensor, fill: float = 0) -> Tensor:
        """`[B, T, ...]` to `[N, ...]`; the tail is `fill`."""
        packed = x.flatten(0, 1)[self.indices]
        tail = self.input_ids.size(1) - self.num_tokens
        return packed if not tail else torch.cat([packed, packed.new_full((tail, *packed.shape[1:]), fill)])

    def unpack(self, values: Tensor) -> Tensor:
        """`[N, ...]` to `[B, T, ...]`, zero where there was padding."""
        batch, length = self.shape
        flat = values.new_zeros(batch * length, *values.shape[1:])
        return flat.index_copy(0, self.indices, values[: self.num_tokens]).unflatten(0, (batch, length))


def pack_batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    *,
    sp_group: dist.ProcessGroup | None = None,
) -> PackedBatch:
    """Pack the tokens where `attention_mask` is set; left, right or mixed padding, rows in order.

    Positions count from 0 in every sequence unless given: `[B, T]`, or `[B, C, T]` for several axes. With `sp_group`
    the row gets a tail, a sequence of its own, up to a multiple of the group's size.
    """
    batch, length = input_ids.shape
    mask = attention_mask.bool()
    indices = mask.flatten().nonzero().squeeze(1)
    lengths = [n for n in mask.sum(1).tolist() if n]
    if not lengths:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} has no token set; a batch needs at least one.")
    tail = -sum(lengths) % (dist.get_world_size(sp_group) if sp_group is not None else 1)
    if tail:
        lengths.append(tail)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device=input_ids.device, dtype=torch.int32)
    packed = PackedBatch(
        input_ids=input_ids.new_empty(1, sum(lengths)),
        position_ids=input_ids,
        segments=PackedSegments(tuple(lengths), cu_seqlens, sp_group),
        indices=indices,
        shape=(batch, length),
    )
    if position_ids is None:
        position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)
    if position_ids.dim() == 3:
        positions = packed.pack(position_ids.transpose(1, 2)).movedim(-1, 0).unsqueeze(1)
    else:
        positions = packed.pack(position_ids).unsqueeze(0)
    if tail:  # from 0, like any sequence, or transformers would take it for the end of the last one
        positions[..., -tail:] = torch.arange(tail, device=positions.device)
    return PackedBatch(packed.pack(input_ids).unsqueeze(0), positions, packed.segments, indices, (batch, length))
