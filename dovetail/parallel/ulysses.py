"""Ulysses sequence parallelism: ranks share the tokens of a sequence, and swap tokens for heads around attention.

Outside attention every rank of a group holds `N / sp` tokens and all heads. Inside, one all-to-all makes that all `N`
tokens and `heads / sp` heads, so attention itself needs no change. Knows nothing of models or attention kernels.

Gradients. Each rank's parameters only see its own tokens, so **the sum of parameter gradients over the group is the
gradient of the loss**, once. `gather_outputs` gives every rank all outputs and every rank computes the same loss; its
backward therefore takes the rank's own slice and adds nothing up. A reducer that averages over data x sequence ranks
(FSDP does) divides by `sp` too often: multiply the loss by the group's size before `backward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_GROUP: ContextVar[dist.ProcessGroup | None] = ContextVar("ulysses_group", default=None)


@contextmanager
def ulysses_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside this block models split sequences over `group`; `None`, or a group of one, means no splitting."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def get_ulysses_group() -> dist.ProcessGroup | None:
    """The active group, or `None` when there is nothing to split."""
    group = _GROUP.get()
    return group if group is not None and dist.get_world_size(group) > 1 else None


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """`[.., N/sp, .., heads, ..]` to `[.., N, .., heads/sp, ..]`. With `unpadded_dim_size`, cut `N` back to it."""
    group = group if group is not None else get_ulysses_group()
    if group is None:
        return x
    size = dist.get_world_size(group)
    if x.size(head_dim) % size:
        raise ValueError(f"{x.size(head_dim)} heads cannot be shared by {size} sequence-parallel ranks; use a divisor.")
    x = _AllToAll.apply(x, head_dim % x.dim(), seq_dim % x.dim(), group)
    return x.narrow(seq_dim, 0, unpadded_dim_size) if 0 < unpadded_dim_size < x.size(seq_dim) else x


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The way back: `[.., N, .., heads/sp, ..]` to `[.., N/sp, .., heads, ..]`; `N` is zero-padded to a multiple."""
    group = group if group is not None else get_ulysses_group()
    if group is None:
        return x
    x = pad_to_multiple(x, seq_dim, dist.get_world_size(group))
    return _AllToAll.apply(x, seq_dim % x.dim(), head_dim % x.dim(), group)


def num_kv_repeats(num_heads: int, num_kv_heads: int, sp_size: int) -> int:
    """How often each KV head must be repeated so that every rank gets the KV heads of its query heads."""
    shared = math.lcm(num_kv_heads, sp_size)
    if num_heads % shared:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} KV heads cannot be shared by {sp_size} sequence-parallel "
            f"ranks: {num_heads} must be a multiple of lcm({num_kv_heads}, {sp_size}) = {shared}."
        )
    return shared // num_kv_heads


def scatter_qkv_heads(
    query: Tensor, key: Tensor, value: Tensor, *, seq_dim: int, head_dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all of attention's inputs. KV heads fewer than ranks are repeated first, no more than needed."""
    repeats = num_kv_repeats(query.size(head_dim), key.size(head_dim), dist.get_world_size(group))
    if repeats > 1:  # repeat_interleave sums the gradient of the copies back into the one head
        key, value = (t.repeat_interleave(repeats, dim=head_dim) for t in (key, value))
    query, key, value = (gather_seq_scatter_heads(t, seq_dim, head_dim, group=group) for t in (query, key, value))
    return query, key, value


def pad_to_multiple(x: Tensor, dim: int, multiple: int) -> Tensor:
    missing = -x.size(dim) % multiple
    if not missing:
        return x
    pad = [0] * (2 * x.dim())
    pad[2 * (x.dim() - 1 - dim % x.dim()) + 1] = missing
    return F.pad(x, pad)


def slice_inputs(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's slice. Backward leaves the gradient of the other ranks' tokens zero: their rank has it."""
    group = group if group is not None else get_ulysses_group()
    if group is None:
        return x
    size = dist.get_world_size(group)
    assert x.size(dim) % size == 0, f"pad dim {dim} of {tuple(x.shape)} to a multiple of {size} before slicing"
    part = x.size(dim) // size
    return x.narrow(dim, dist.get_rank(group) * part, part)


def gather_outputs(x: Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' slices along `dim`, for a loss every rank computes alike. Backward keeps the own slice, unscaled."""
    group = group if group is not None else get_ulysses_group()
    return x if group is None else _Gather.apply(x, dim % x.dim(), group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.swap = (scatter_dim, gather_dim, group)
        return _all_to_all(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        scatter_dim, gather_dim, group = ctx.swap
        return _all_to_all(grads[0], gather_dim, scatter_dim, group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.shard = (dim, x.size(dim), dist.get_rank(group))
        front = x.movedim(dim, 0).contiguous()
        out = front.new_empty(dist.get_world_size(group) * front.size(0), *front.shape[1:])
        dist.all_gather(list(out.chunk(dist.get_world_size(group))), front, group=group)
        return out.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dim, length, rank = ctx.shard
        return grads[0].narrow(dim, rank * length, length).contiguous(), None, None


def _all_to_all(x: Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    send = x.unflatten(scatter_dim, (size, -1)).movedim(scatter_dim, 0).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    # The leading dimension is now the rank a piece came from: in front of gather_dim it makes rank-major order.
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()
