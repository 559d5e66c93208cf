"""Megatron shards to full tensors under Hugging Face names, on every rank, a bucket at a time.

A bucket goes from its pipeline stage to the others, then over the ranks that share its weights; beside its
own shards a rank never holds more than one bucket. Knows no engine: who takes the tensors is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail.backends.megatron.families.local_weights import (
    LocalWeight,
    experts_per_rank,
    is_expert,
    local_weights,
    shared_by,
    with_expert_of,
)
from dovetail.backends.megatron.families.shards import merge_shards

if TYPE_CHECKING:
    from dovetail.backends.megatron.families.base import MegatronFamily
    from dovetail.backends.megatron.parts import MegatronModel

ReadParameter = Callable[[nn.Parameter], Tensor]
"""What is gathered of a parameter: the weight itself, or something of its shape such as its gradient."""

BUCKET_BYTES = 512 << 20
# Views of a wider dtype need aligned starts.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Entry:
    """A shard as every rank of a pipeline group knows it; it has the same shape on all ranks that share the weight."""

    name: str
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    """`whole`, `dense` or `expert`: over which ranks it is gathered."""

    @property
    def num_bytes(self) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def gather_weights(
    family: MegatronFamily,
    model: MegatronModel,
    read: ReadParameter,
    *,
    buffers: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """All tensors, stage by stage. A bucket counts its gathered bytes; a larger tensor is a bucket of its own."""
    held = {weight.name: weight for weight in local_weights(model, buffers=buffers)}
    values = {name: _value(weight, read) for name, weight in held.items() if not family.is_copy(model, name)}
    entries = [
        _Entry(name, model.layout.pp_rank, tuple(value.shape), value.dtype, _kind(family, model, name))
        for name, value in values.items()
    ]
    for bucket in _buckets(_over_stages(model, entries), model, bucket_bytes):
        yield from _send(family, model, bucket, values)


def _value(weight: LocalWeight, read: ReadParameter) -> Tensor:
    if weight.is_buffer:
        return weight.tensor
    assert isinstance(weight.tensor, nn.Parameter), f"{weight.name} is no parameter"
    return read(weight.tensor)


def _kind(family: MegatronFamily, model: MegatronModel, name: str) -> str:
    if is_expert(name):
        return "expert"
    return "whole" if family.layout(model, name).dim is None else "dense"


def _over_stages(model: MegatronModel, entries: list[_Entry]) -> list[_Entry]:
    """The entries of all stages; stages hold different layers, so one cannot know another's."""
    layout = model.layout
    if layout.pp_size == 1:
        return entries
    by_stage: list[list[_Entry]] = [[] for _ in range(layout.pp_size)]
    dist.all_gather_object(by_stage, entries, group=layout.pp_group)
    return [entry for stage in by_stage for entry in stage]


def _buckets(entries: list[_Entry], model: MegatronModel, bucket_bytes: int) -> Iterator[list[_Entry]]:
    layout = model.layout
    copies = {"whole": 1, "dense": layout.tp_size, "expert": layout.etp_size * layout.ep_size}
    # One kind after the other inside a stage: a bucket has one owner and one way of gathering.
    ordered = sorted(entries, key=lambda entry: (entry.stage, entry.kind))
    bucket: list[_Entry] = []
    size = 0
    for entry in ordered:
        gathered = entry.num_bytes * copies[entry.kind]
        other = bucket and (entry.stage, entry.kind) != (bucket[0].stage, bucket[0].kind)
        if bucket and (other or size + gathered > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += gathered
    if bucket:
        yield bucket


def _send(
    family: MegatronFamily, model: MegatronModel, bucket: list[_Entry], values: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    layout, first = model.layout, bucket[0]
    is_owner = first.stage == layout.pp_rank
    device = next(iter(values.values())).device
    flat = torch.empty(sum(entry.num_bytes for entry in bucket), dtype=torch.uint8, device=device)
    if is_owner:
        for entry, view in _views(bucket, flat):
            view.copy_(values[entry.name])
    if layout.pp_size > 1:
        dist.broadcast(flat, group=layout.pp_group, group_src=first.stage)
    groups = [] if first.kind == "whole" else shared_by(model, first.name)[0]
    shards = _gathered(flat, groups)
    per_rank, parts = experts_per_rank(model), layout.etp_size
    copies = [dict(_named_places(bucket, shard)) for shard in shards]
    for entry in bucket:
        if entry.kind != "expert":
            weights = [copy[entry.name] for copy in copies]
            yield from merge_shards(family.layout(model, entry.name), weights)
            continue
        for ep_rank in range(layout.ep_size):
            weights = [copy[entry.name] for copy in copies[ep_rank * parts : (ep_rank + 1) * parts]]
            name = with_expert_of(entry.name, ep_rank, per_rank)
            yield from merge_shards(family.layout(model, name), weights)


def _gathered(flat: Tensor, groups: list[dist.ProcessGroup]) -> list[Tensor]:
    """One buffer for each rank of the groups; the first group's ranks lie side by side."""
    size = flat.numel()
    for group in groups:
        if group.size() > 1:
            wider = torch.empty(group.size() * flat.numel(), dtype=flat.dtype, device=flat.device)
            dist.all_gather_into_tensor(wider, flat, group=group)
            flat = wider
    return list(flat.split(size))


def _views(bucket: list[_Entry], flat: Tensor) -> Iterator[tuple[_Entry, Tensor]]:
    position = 0
    for entry in bucket:
        used = math.prod(entry.shape) * entry.dtype.itemsize
        yield entry, flat[position : position + used].view(entry.dtype).view(entry.shape)
        position += entry.num_bytes


def _named_places(bucket: list[_Entry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for entry, view in _views(bucket, flat):
        yield entry.name, view
