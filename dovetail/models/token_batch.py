"""What a model's forward takes: the tokens of a batch as the layers see them, and which of their states are read.

Made on the host from padded columns, so that no number has to come back from a device before the layers run. Knows no
model: `TransformerBackbone.prepare` says what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.models.attention import no_mask
from dovetail.models.packing import PackedBatch, PackedSegments
from dovetail.parallel.ulysses import gather_outputs, slice_inputs
from dovetail.protocol.routed_experts import at_places


class Reads(NamedTuple):
    """States that a head reads, `R` of them, and where in its result each number goes."""

    rows: Tensor
    columns: Tensor
    """`[R]` each: the tokens of the padded batch whose states are read, in row order."""
    targets: tuple[Tensor, ...]
    """`[R]` each, one for every dimension of the result."""
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RowPart:
    """What a rank has to know where several share a row (Ulysses)."""

    group: dist.ProcessGroup
    num_states: int
    """Hidden states that this rank has."""
    all_states: Tensor
    """`[A]`: those that are read, in the row of all ranks."""
    own: slice
    """Which of the `A` are this rank's."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The tokens of this rank, and the states that are read: `R` of this rank, `A` of all that share the row.

    A dataclass, and no tuple or mapping: FSDP moves and casts the tensors of those.
    """

    input_ids: Tensor
    """`[1, n]` packed, or `[B, T]`."""
    position_ids: Tensor
    """The same, or with position axes before it."""
    attention_mask: Tensor
    """`[B, T]`, or `no_mask()` where the row is packed."""
    segments: PackedSegments | None
    """None: padded."""
    states: Tensor
    """`[R]`: which hidden states of this rank are read."""
    labels: Tensor
    """`[R]`: the token after each of them."""
    targets: tuple[Tensor, ...]
    """`[A]` each: where in the padded result the numbers go."""
    shape: tuple[int, ...]
    """Of the padded result."""
    part: RowPart | None = None
    """None: this rank has the whole row."""
    routed_experts: Tensor | None = None
    """`[n, layers, k]`: those that the tokens are sent to. None: the routers choose."""
    places: Tensor | None = None
    """`[B, T]`: where each token of the padded batch stands in the row of all ranks, -1 for padding. None where experts
    are neither recorded nor replayed."""

    def at_targets(self, column: Tensor) -> Tensor:
        """What a padded column has in the places that this rank's states are about: `[B, T, ...]` to `[R, ...]`."""
        own = slice(None) if self.part is None else self.part.own
        return column[tuple(target[own] for target in self.targets)]

    def with_experts(self, routed_experts: Sequence[np.ndarray]) -> TokenBatch:
        """With those of each row of the padded batch (`protocol.routed_experts`) to be replayed."""
        assert self.places is not None, "they are left out where nothing is replayed"
        if self.part is None:
            return replace(self, routed_experts=at_places(routed_experts, self.places, self.input_ids.numel()))
        num_tokens = self.part.num_states * dist.get_world_size(self.part.group)
        row = at_places(routed_experts, self.places, num_tokens)
        return replace(self, routed_experts=slice_inputs(row, 0, self.part.group))

    def in_padded(self, experts: Tensor) -> Tensor:
        """`[n, ...]`, those of this rank's tokens, to the padded batch of all ranks: `[B, T, ...]`, any on padding."""
        assert self.places is not None, "they are left out where nothing is recorded"
        if self.part is not None:  # NCCL sends no int16
            experts = gather_outputs(experts.int(), 0, self.part.group).to(experts.dtype)
        return experts[self.places.clamp(min=0)]

    def spread(self, values: Tensor) -> Tensor:
        """`[R, ...]`, one for each state that is read, to the padded result of all ranks; 0 elsewhere."""
        if self.part is not None:
            row = values.new_zeros(self.part.num_states, *values.shape[1:]).index_copy(0, self.states, values)
            values = gather_outputs(row, 0, self.part.group)[self.part.all_states]
        # Not a view: FSDP2 hangs its backward hook on what a model returns.
        return values.new_zeros(*self.shape, *values.shape[1:]).index_put(self.targets, values)


def padded_tokens(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, reads: Reads, labels: Tensor
) -> TokenBatch:
    """The columns as they are. `position_ids`: `[B, T]`, `[B, C, T]`, or None to count from 0 in every row."""
    if position_ids is None:
        position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    elif position_ids.dim() == 3:
        position_ids = position_ids.transpose(0, 1)
    states = reads.rows * input_ids.size(1) + reads.columns
    return TokenBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        segments=None,
        states=states,
        labels=labels,
        targets=reads.targets,
        shape=reads.shape,
        places=torch.arange(input_ids.numel()).view_as(input_ids).masked_fill(attention_mask == 0, -1),
    )


def packed_tokens(batch: PackedBatch, reads: Reads, labels: Tensor, *, whole_row: bool) -> TokenBatch:
    """This rank's slice of the row, or all of it with `whole_row`, and those of the reads whose states it has."""
    ids, positions, group = batch.input_ids, batch.position_ids, batch.segments.sp_group
    states = batch.places[reads.rows, reads.columns]
    everyone = TokenBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=no_mask(),
        segments=batch.segments,
        states=states,
        labels=labels,
        targets=reads.targets,
        shape=reads.shape,
        places=batch.places,
    )
    if group is None:
        return everyone
    num_own = ids.size(1) // dist.get_world_size(group)
    first = dist.get_rank(group) * num_own
    # Places rise from state to state, so those of one rank are neighbours.
    own = slice(*torch.searchsorted(states, torch.tensor([first, first + num_own])).tolist())
    if not whole_row:
        ids, positions = slice_inputs(ids, 1, group), slice_inputs(positions, positions.dim() - 1, group)
    return replace(
        everyone,
        input_ids=ids,
        position_ids=positions,
        states=states[own] - first,
        labels=labels[own],
        part=RowPart(group, num_own, states, own),
    )
