"""Causal attention of several tokens of each sequence over paged keys and values.

A layer's keys are (pages, kv heads, page size, head size), values alike; a table lists each sequence's pages. Every row
goes through its pages in order, in tiles that are the same for every batch: its result depends on no other row.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

_LOG2_E = 1.4426950408889634


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
    heads_together: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """Ragged prefill: query (tokens, heads * head size) holds segments end to end, their keys are in the pages already.

    `blocks` (n, 2) names for each block of `block_size` queries its segment and first query in it. `segments` (m, 3)
    holds a segment's first packed token, its number of tokens, and how many tokens of its sequence lie before it.
    Row i of `table` lists the pages of segment i's sequence. With `heads_together`, for segments of one token, a block
    holds the query heads of one key head instead, so that its keys are read once: the same tiles, the same bits.
    A token sees the last `window` tokens, itself included; pages that no query of a block sees are not read.
    """
    width = query.shape[1]
    _, num_kv, page_size, head_size = keys.shape
    num_heads = width // head_size
    together = num_heads // num_kv if heads_together else 1
    out = torch.empty_like(query)
    _prefill_kernel[(blocks.shape[0], num_heads // together)](
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
        TOGETHER=together,
        HEAD=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        PAGE=page_size,
        BLOCK=block_size,
        WINDOW=window or 0,
        num_warps=4,
        num_stages=2,
    )
    return out


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
    TOGETHER: tl.constexpr,  # heads of a token that are rows of one block
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
):
    block = tl.program_id(0)
    first_head = tl.program_id(1) * TOGETHER
    segment = tl.load(block_ptr + block * 2).to(tl.int64)
    start = tl.load(block_ptr + block * 2 + 1)
    first_token = tl.load(segment_ptr + segment * 3).to(tl.int64)
    num_tokens = tl.load(segment_ptr + segment * 3 + 1)
    before = tl.load(segment_ptr + segment * 3 + 2)
    rows = start + tl.arange(0, BLOCK) // TOGETHER
    heads = first_head + tl.arange(0, BLOCK) % TOGETHER
    columns = tl.arange(0, HEAD_PADDED)
    offsets = tl.arange(0, PAGE)
    query_offsets = (first_token + rows)[:, None] * width + heads[:, None] * HEAD + columns[None, :]
    query_mask = (rows[:, None] < num_tokens) & (columns[None, :] < HEAD)
    query = tl.load(query_ptr + query_offsets, mask=query_mask, other=0.0)
    # The last key that the last query of this block sees.
    end = before + tl.minimum(start + BLOCK, num_tokens)
    first_page = 0
    if WINDOW:
        first_page = tl.maximum(before + start + 1 - WINDOW, 0) // PAGE

    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, HEAD_PADDED], dtype=tl.float32)
    for index in range(first_page, (end + PAGE - 1) // PAGE):
        page = tl.load(table_ptr + segment * table_stride + index).to(tl.int64)
        positions = index * PAGE + offsets
        tile = (page * NUM_KV + first_head // GROUP) * PAGE * HEAD + offsets[:, None] * HEAD + columns[None, :]
        tile_mask = (positions[:, None] < end) & (columns[None, :] < HEAD)
        key = tl.load(key_ptr + tile, mask=tile_mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(positions[None, :] <= before + rows[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(positions[None, :] > before + rows[:, None] - WINDOW, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = new_top
        if WINDOW:
            # The first pages of a block may be before the window of a later query: -inf - -inf must not become NaN.
            # Without a window every query sees position 0, so after the first page no maximum is -inf.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(value_ptr + tile, mask=tile_mask, other=0.0).to(query.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top
    acc = acc / total[:, None]
    tl.store(out_ptr + query_offsets, acc.to(out_ptr.dtype.element_ty), mask=query_mask)
