"""Attention of decode steps over paged keys and values; reads of each sequence no more than it holds. Of prompts:
`models.kernels.paged_attention`.

A layer's keys are (pages, kv heads, page size, head size), values alike; a table lists each sequence's pages. The query
heads that share a key head are the rows of one small matrix product, so every key is read once per step.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.device import described
from dovetail.rollout.native.cuda.kernels.overlap import follow, launch_options, overlaps

_LOG2_E = 1.4426950408889634
# The smallest matrix the tensor cores multiply has 16 rows.
_MIN_ROWS = 16
# Pages on their way to a program, by the programs that share a sequence: what was fastest on an H200 where each program
# has a multiprocessor to itself. Large buffers also keep two of them off the same one.
_BUFFERS = {1: 4, 2: 3, 4: 4}
_BUFFER_BYTES = 136 << 10
_SMALL_PAGE_BYTES = 32 << 10


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
    window: int | None = None,
) -> torch.Tensor:
    """One query token per row: query (rows, heads * head size), `slots` the table row of each, `lengths` its keys.

    A row of length 0 reads nothing and gives zeros. `num_splits` programs share the keys of one sequence, and a second
    kernel puts their parts together: worth it when there are fewer (row, kv head) pairs than multiprocessors. A token
    sees the last `window` keys; pages before them are not read.
    """
    rows, width = query.shape
    _, num_kv, page_size, head_size = keys.shape
    num_heads = width // head_size
    group = num_heads // num_kv
    padded = triton.next_power_of_2(head_size)
    out = torch.empty_like(query)
    parts, stats = out, out
    if num_splits > 1:
        parts = query.new_empty((rows, num_heads, num_splits, head_size), dtype=torch.float32)
        stats = query.new_empty((rows, num_heads, 2, num_splits), dtype=torch.float32)
    page_bytes = 2 * page_size * padded * keys.element_size()
    warps, stages, overlap = _launch(query.device, rows * num_kv, num_splits, page_bytes)
    _decode_kernel[(rows, num_kv, num_splits)](
        query,
        keys,
        values,
        table,
        slots,
        lengths,
        out,
        parts,
        stats,
        scaling * _LOG2_E,
        table.stride(0),
        NUM_KV=num_kv,
        GROUP=group,
        GROUP_ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        HEAD=head_size,
        HEAD_PADDED=padded,
        PAGE=page_size,
        SPLITS=num_splits,
        WINDOW=window or 0,
        STAGES=stages,
        OVERLAP=overlap,
        num_warps=warps,
        **launch_options(overlap),
    )
    if num_splits > 1:
        _put_together_kernel[(rows, num_heads)](
            parts,
            stats,
            out,
            NUM_HEADS=num_heads,
            HEAD=head_size,
            HEAD_PADDED=padded,
            SPLITS=num_splits,
            OVERLAP=overlap,
            num_warps=1,
            **launch_options(overlap),
        )
    return out


def _launch(device: torch.device, num_pairs: int, num_splits: int, page_bytes: int) -> tuple[int, int, bool]:
    """Warps and stages of a decode kernel's programs, and whether kernels overlap.

    The compiler gives the number of a page a stage of its own, so it takes two stages to have one page more on its way.
    """
    if device.type != "cuda":
        return 4, 3, False
    card = described(device)
    programs_each = num_pairs * num_splits / card.processors
    if programs_each > 2 or not card.large_shared_memory:
        # More small programs reach more bandwidth.
        return 2 if num_splits == 1 and page_bytes <= _SMALL_PAGE_BYTES else 4, 3, False
    buffers = _BUFFERS.get(num_splits, 2) if programs_each <= 1 else 2
    return 4, 2 * max(1, min(buffers, _BUFFER_BYTES // page_bytes)) + 1, overlaps(device)


@triton.jit
def _decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    slot_ptr,
    length_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    table_stride,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
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
    if WINDOW:
        first_page = tl.maximum(length - WINDOW, 0) // PAGE
        pages_each = (num_pages - first_page + SPLITS - 1) // SPLITS
        first = first_page + split * pages_each
    else:
        pages_each = (num_pages + SPLITS - 1) // SPLITS
        first = split * pages_each
    last = tl.minimum(first + pages_each, num_pages)
    follow(OVERLAP)
    query = tl.load(query_ptr + query_offsets, mask=query_mask, other=0.0)

    top = tl.full([GROUP_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_ROWS], dtype=tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_PADDED], dtype=tl.float32)
    for index in tl.range(first, last, num_stages=STAGES):
        page = tl.load(table_ptr + slot * table_stride + index).to(tl.int64)
        positions = index * PAGE + offsets
        inside = positions < length
        if WINDOW:
            inside = inside & (positions >= length - WINDOW)
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
        all_heads = (row * NUM_KV + head) * GROUP + heads
        part = (all_heads * SPLITS + split)[:, None] * HEAD + columns[None, :]
        stats = stats_ptr + all_heads * 2 * SPLITS + split
        tl.store(parts_ptr + part, acc, mask=query_mask)
        tl.store(stats, top, mask=heads < GROUP)
        tl.store(stats + SPLITS, total, mask=heads < GROUP)


@triton.jit
def _put_together_kernel(
    parts_ptr,
    stats_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The parts of a head weighted by their sums, on the scale of the largest score of all."""
    head = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD
    stats = stats_ptr + head * 2 * SPLITS + splits
    parts = parts_ptr + (head * SPLITS + splits)[:, None] * HEAD + columns[None, :]
    follow(OVERLAP)
    tops = tl.load(stats)
    totals = tl.load(stats + SPLITS)
    accs = tl.load(parts, mask=in_head[None, :], other=0.0)
    # A part without keys has top -inf: its weight is 0, and -inf - -inf must not become NaN.
    weights = tl.where(tops == float("-inf"), 0.0, tl.exp2(tops - tl.max(tops, axis=0)))
    total = tl.sum(totals * weights, axis=0)
    # No keys: total is 0 and so is acc.
    acc = tl.sum(accs * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + head * HEAD + columns, acc.to(out_ptr.dtype.element_ty), mask=in_head)
