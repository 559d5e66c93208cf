"""A padded micro-batch as Megatron takes it: sequences end to end (THD), and the way back. Only indices and copies.

Every sequence is padded to a multiple of what context-parallel ranks cut it into; the last one also up to what
tensor-parallel ranks cut the row into. Padding is behind its sequence, where no real token looks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from dovetail.backends.megatron.attention import zigzag_places
from dovetail.backends.megatron.layout import MegatronLayout
from dovetail.backends.megatron.no_te import has_transformer_engine


@dataclass(frozen=True)
class ThdBatch:
    """`t` tokens of this rank out of `N` of the packed row, which holds the `[B, T]` batch without its padding."""

    input_ids: Tensor
    """`[1, t]`"""
    position_ids: Tensor
    """`[1, t]`"""
    params: PackedSeqParams
    shape: tuple[int, int]
    num_packed: int
    """`N`"""
    sources: Tensor
    """`[num_tokens]`: index of each real token in the flattened `[B * T]` batch."""
    slots: Tensor
    """`[num_tokens]`: its index in the packed row."""
    own: Tensor | None
    """`[t]`: indices in the packed row of this rank's tokens; None when it holds all."""
    cp_group: dist.ProcessGroup

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` to this rank's `[t, ...]`, 0 on padding."""
        row = x.new_zeros(self.num_packed, *x.shape[2:]).index_copy(0, self.slots, x.flatten(0, 1)[self.sources])
        return row if self.own is None else row[self.own]

    def unpack(self, values: Tensor) -> Tensor:
        """`[t, ...]` of every rank to `[B, T, ...]`, 0 where there was padding; backward takes this rank's own part."""
        row = values if self.own is None else _GatherRow.apply(values, self.own, self.num_packed, self.cp_group)
        batch, length = self.shape
        flat = values.new_zeros(batch * length, *values.shape[1:]).index_copy(0, self.sources, row[self.slots])
        return flat.unflatten(0, (batch, length))


def pack_thd(input_ids: Tensor, attention_mask: Tensor, layout: MegatronLayout) -> ThdBatch:
    """Pack the tokens where the mask is set; positions count from 0 in every sequence."""
    mask = attention_mask.bool()
    counts = [count for count in mask.sum(1).tolist() if count]
    if not counts:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} has no token set; a batch needs at least one.")
    lengths = padded_lengths(counts, layout)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    device = input_ids.device
    slots = torch.cat([start + torch.arange(count) for start, count in zip(starts.tolist(), counts, strict=False)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    own = zigzag_places(lengths, layout.cp_size, layout.cp_rank) if layout.cp_size > 1 else None
    # Rotary embeddings ask for the lengths on the host, twice in every layer; only Transformer Engine's kernels want
    # them on the device.
    offsets = starts.to(device=device if has_transformer_engine() else "cpu", dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    packed = ThdBatch(
        input_ids=input_ids,
        position_ids=(positions if own is None else positions[own]).unsqueeze(0).to(device),
        params=params,
        shape=(input_ids.size(0), input_ids.size(1)),
        num_packed=sum(lengths),
        sources=mask.flatten().nonzero().squeeze(1),
        slots=slots.to(device),
        own=None if own is None else own.to(device),
        cp_group=layout.cp_group,
    )
    return replace(packed, input_ids=packed.pack(input_ids).unsqueeze(0))


def padded_lengths(counts: list[int], layout: MegatronLayout) -> list[int]:
    """Lengths that divide: each by the chunks of a sequence, their sum also by the tensor-parallel ranks."""
    chunks = 2 * layout.cp_size if layout.cp_size > 1 else 1
    lengths = [-(-count // chunks) * chunks for count in counts]
    lengths[-1] += -sum(lengths) % (chunks * layout.tp_size)
    return lengths


class _GatherRow(torch.autograd.Function):
    """All ranks' parts in the order of the row. Every rank computes the same loss from it, so its own part of the
    gradient is all there is to take: the reduction over data- and context-parallel ranks adds the parts up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, num_packed: int, group: dist.ProcessGroup) -> Tensor:
        ctx.own = own
        parts = [torch.empty_like(values) for _ in range(group.size())]
        slots = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, values.contiguous(), group=group)
        dist.all_gather(slots, own, group=group)
        return values.new_empty(num_packed, *values.shape[1:]).index_copy(0, torch.cat(slots), torch.cat(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.own], None, None, None
