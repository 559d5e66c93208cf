"""Attention over paged keys and values. Causal and full; reads of each sequence no more than it holds.

A layer's keys are (pages, kv heads, page size, head size), values alike; a table lists each sequence's pages. The query
heads that share a key head are the rows of one small matrix product, so every key is read once per step.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.overlap import follow, launch_options, overlaps

_LOG2_E = 1.4426950408889634
# The smallest matrix the tensor cores multiply has 16 rows.
_MIN_ROWS = 16


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    *,
    num_splits: int = 1,
    locks: torch.Tensor | None = None,
    num_warps: int | None = None,
    num_stages: int = 3,
) -> torch.Tensor:
    """One query token per row: query (rows, heads * head size), `slots` the table row of each, `lengths` its keys.

    A row of length 0 reads nothing and gives zeros. `num_splits` programs share the keys of one sequence: worth it when
    there are fewer (row, kv head) pairs than the device holds programs. The one that ends last puts their parts
    together; which it is, `locks` tell, one for each pair: zeros, and zeros again when this is over.
    """
    rows, width = query.shape
    _, num_kv, page_size, head_size = keys.shape
    group = width // head_size // num_kv
    group_rows = max(_MIN_ROWS, triton.next_power_of_2(group))
    padded = triton.next_power_of_2(head_size)
    out = torch.empty_like(query)
    if num_splits == 1:
        partial, partial_stats, locks = out, out, out
    else:
        if locks is None:
            locks = torch.zeros(rows * num_kv, dtype=torch.int32, device=query.device)
        partial = query.new_empty((rows, num_kv, num_splits, group_rows, head_size), dtype=torch.float32)
        partial_stats = query.new_empty((rows, num_kv, num_splits, 2, group_rows), dtype=torch.float32)
    overlap = num_splits > 1 and overlaps(query.device)
    _decode_kernel[(rows, num_kv, num_splits)](
        query,
        keys,
        values,
        table,
        slots,
        lengths,
        out,
        partial,
        partial_stats,
        locks,
        scaling * _LOG2_E,
        table.stride(0),
        NUM_KV=num_kv,
        GROUP=group,
        GROUP_ROWS=group_rows,
        HEAD=head_size,
        HEAD_PADDED=padded,
        PAGE=page_size,
        SPLITS=num_splits,
        STAGES=num_stages,
        OVERLAP=overlap,
        # Measured on an H200: more small programs reach more bandwidth, unless few programs share long sequences.
        num_warps=num_warps or (2 if num_splits == 1 and page_size <= 64 else 4),
        **launch_options(overlap),
    )
    return out


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    blocks: torch.Tensor,
    segments: torch.Tensor,
    scaling: float,
    *,
    block_size: int,
) -> torch.Tensor:
    """Ragged prefill: query (tokens, heads * head size) holds segments end to end, their keys are in the pages already.

    `blocks` (n, 2) names for each block of `block_size` queries its segment and first query in it. `segments` (m, 3)
    holds a segment's first packed token, its number of tokens, and how many tokens of its sequence lie before it.
    Row i of `table` lists the pages of segment i's sequence.
    """
    width = query.shape[1]
    _, num_kv, page_size, head_size = keys.shape
    num_heads = width // head_size
    out = torch.empty_like(query)
    _prefill_kernel[(blocks.shape[0], num_heads)](
        query,
        keys,
        values,
        table,
        blocks,
        segments,
        out,
        scaling * _LOG2_E,
        table.stride(0),
        width,
        NUM_KV=num_kv,
        GROUP=num_heads // num_kv,
        HEAD=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        PAGE=page_size,
        BLOCK=block_size,
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit
def _decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    slot_ptr,
    length_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    lock_ptr,
    scale,
    table_stride,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + row)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    heads = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, HEAD_PADDED)
    offsets = tl.arange(0, PAGE)
    query_offsets = (row * NUM_KV + head) * GROUP * HEAD + heads[:, None] * HEAD + columns[None, :]
    query_mask = (heads[:, None] < GROUP) & (columns[None, :] < HEAD)
    num_pages = (length + PAGE - 1) // PAGE
    pages_each = (num_pages + SPLITS - 1) // SPLITS
    first = split * pages_each
    last = tl.minimum(first + pages_each, num_pages)
    # The next kernel begins when this one ends: begun before, it would take places of this one's programs.
    follow(OVERLAP, leads=False)
    query = tl.load(query_ptr + query_offsets, mask=query_mask, other=0.0)

    top = tl.full([GROUP_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_ROWS], dtype=tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_PADDED], dtype=tl.float32)
    for index in tl.range(first, last, num_stages=STAGES):
        page = tl.load(table_ptr + slot * table_stride + index).to(tl.int64)
        positions = index * PAGE + offsets
        inside = positions < length
        tile = (page * NUM_KV + head) * PAGE * HEAD + offsets[:, None] * HEAD + columns[None, :]
        tile_mask = inside[:, None] & (columns[None, :] < HEAD)
        key = tl.load(key_ptr + tile, mask=tile_mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(value_ptr + tile, mask=tile_mask, other=0.0).to(query.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top

    if SPLITS == 1:
        # No keys: total is 0 and so is acc.
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out_ptr + query_offsets, acc.to(out_ptr.dtype.element_ty), mask=query_mask)
    else:
        pair = row * NUM_KV + head
        place = heads[:, None] * HEAD + columns[None, :]
        part = pair * SPLITS + split
        tl.store(partial_ptr + part * GROUP_ROWS * HEAD + place, acc, mask=query_mask)
        tl.store(stats_ptr + part * 2 * GROUP_ROWS + heads, top)
        tl.store(stats_ptr + (part * 2 + 1) * GROUP_ROWS + heads, total)
        # All of this program's part is written before it counts as arrived.
        tl.debug_barrier()
        if tl.atomic_add(lock_ptr + pair, 1, sem="acq_rel") == SPLITS - 1:
            top, total = _together(stats_ptr, pair, heads, SPLITS, GROUP_ROWS)
            acc = tl.zeros([GROUP_ROWS, HEAD_PADDED], dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                part = pair * SPLITS + other
                part_acc = tl.load(
                    partial_ptr + part * GROUP_ROWS * HEAD + place, mask=query_mask, other=0.0, cache_modifier=".cg"
                )
                part_top = tl.load(stats_ptr + part * 2 * GROUP_ROWS + heads, cache_modifier=".cg")
                acc += part_acc * _weight(part_top, top)[:, None]
            acc = acc / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(out_ptr + query_offsets, acc.to(out_ptr.dtype.element_ty), mask=query_mask)
            tl.store(lock_ptr + pair, 0)


@triton.jit
def _together(stats_ptr, pair, heads, SPLITS: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """The largest score of all parts, and the sum of their weights on its scale."""
    parts = (pair * SPLITS + tl.arange(0, SPLITS)) * 2 * GROUP_ROWS
    tops = tl.load(stats_ptr + parts[:, None] + heads[None, :], cache_modifier=".cg")
    totals = tl.load(stats_ptr + parts[:, None] + GROUP_ROWS + heads[None, :], cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    return top, tl.sum(totals * _weight(tops, top[None, :]), axis=0)


@triton.jit
def _weight(part_top, top):
    # A part without keys has top -inf: its weight is 0, and -inf - -inf must not become NaN.
    return tl.where(part_top == float("-inf"), 0.0, tl.exp2(part_top - top))


@triton.jit
def _prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    block_ptr,
    segment_ptr,
    out_ptr,
    scale,
    table_stride,
    width,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.load(block_ptr + block * 2).to(tl.int64)
    start = tl.load(block_ptr + block * 2 + 1)
    first_token = tl.load(segment_ptr + segment * 3).to(tl.int64)
    num_tokens = tl.load(segment_ptr + segment * 3 + 1)
    before = tl.load(segment_ptr + segment * 3 + 2)
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, HEAD_PADDED)
    offsets = tl.arange(0, PAGE)
    query_offsets = (first_token + rows)[:, None] * width + head * HEAD + columns[None, :]
    query_mask = (rows[:, None] < num_tokens) & (columns[None, :] < HEAD)
    query = tl.load(query_ptr + query_offsets, mask=query_mask, other=0.0)
    # The last key that the last query of this block sees.
    end = before + tl.minimum(start + BLOCK, num_tokens)

    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, HEAD_PADDED], dtype=tl.float32)
    for index in range((end + PAGE - 1) // PAGE):
        page = tl.load(table_ptr + segment * table_stride + index).to(tl.int64)
        positions = index * PAGE + offsets
        tile = (page * NUM_KV + head // GROUP) * PAGE * HEAD + offsets[:, None] * HEAD + columns[None, :]
        tile_mask = (positions[:, None] < end) & (columns[None, :] < HEAD)
        key = tl.load(key_ptr + tile, mask=tile_mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(positions[None, :] <= before + rows[:, None], scores, float("-inf"))
        # Every query sees position 0, so after the first page no maximum is -inf.
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(value_ptr + tile, mask=tile_mask, other=0.0).to(query.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top
    acc = acc / total[:, None]
    tl.store(out_ptr + query_offsets, acc.to(out_ptr.dtype.element_ty), mask=query_mask)
