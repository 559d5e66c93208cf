"""Which tokens top-k, top-p and min-p leave of each row. Nothing is sorted, and the host is asked nothing.

All filters amount to one smallest logit per row. It is found bit by bit: does what lies above a value weigh (top-p), or
count (top-k), less than wanted? A row's logits are read once from memory and then, some twenty times, from the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.slots import SlotState

# Logits that a program looks at together.
_CHUNK = 8192


class Kept(NamedTuple):
    """What the filters leave: the weight of each block of 128 tokens, and the smallest logit of each row."""

    sums: torch.Tensor
    thresholds: torch.Tensor


def keep(
    logits: torch.Tensor,
    slots: torch.Tensor,
    state: SlotState,
    tops: torch.Tensor,
    sums: torch.Tensor,
    *,
    block: int,
    blocks_each: int,
) -> Kept:
    """`tops` and `sums` of the blocks before filtering; see `kernels.sampling`."""
    rows, vocabulary = logits.shape
    num_blocks = tops.shape[1]
    thresholds = logits.new_empty(rows, dtype=torch.float32)
    row_tops = torch.empty_like(thresholds)
    _threshold_kernel[(rows,)](
        logits,
        slots,
        state.temperatures,
        state.filters.top_k,
        state.filters.top_p,
        tops,
        sums,
        thresholds,
        row_tops,
        logits.stride(0),
        vocabulary,
        num_blocks,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocabulary)),
        # All that bfloat16 has; other dtypes are looked at as float32.
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        num_warps=8,
    )
    kept = torch.empty_like(sums)
    _kept_kernel[(rows, triton.cdiv(num_blocks, blocks_each))](
        logits,
        slots,
        state.temperatures,
        state.filters.min_p,
        tops,
        thresholds,
        row_tops,
        kept,
        logits.stride(0),
        vocabulary,
        num_blocks,
        BLOCK=block,
        EACH=blocks_each,
        num_warps=4,
    )
    return Kept(kept, thresholds)


@triton.jit
def stays(logits, weights, threshold, min_p):
    return (logits >= threshold) & (weights >= min_p)


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Integers in the order of floats, of the bits in front."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)).to(tl.int64)


@triton.jit
def _value(key, BITS: tl.constexpr):
    """The float that `_key` made this of."""
    bits = key.to(tl.int32) << (32 - BITS)
    if BITS < 32:
        # The bits behind are zeros, which `_key` has turned in negative numbers.
        bits = tl.where(key < 0, bits | ((1 << (32 - BITS)) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(logit_ptr, key, temperature, top, vocabulary, CHUNK: tl.constexpr, BITS: tl.constexpr):
    """How many logits of a row are larger than the one of this key, and what they weigh."""
    count = tl.zeros([], dtype=tl.int32)
    weight = tl.zeros([], dtype=tl.float64)
    for first in range(0, vocabulary, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        logits = tl.load(logit_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        larger = (columns < vocabulary) & (_key(logits, BITS) > key)
        count += tl.sum(larger.to(tl.int32), axis=0)
        weight += tl.sum(tl.where(larger, tl.exp(logits / temperature - top), 0.0), axis=0).to(tl.float64)
    return count, weight


@triton.jit
def _threshold_kernel(
    logit_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    top_ptr,
    sum_ptr,
    threshold_ptr,
    row_top_ptr,
    stride,
    vocabulary,
    num_blocks,
    BLOCKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    blocks = tl.arange(0, BLOCKS_PADDED)
    inside = blocks < num_blocks
    tops = tl.load(top_ptr + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + blocks, mask=inside, other=0.0)
    top = tl.max(tops, axis=0)
    left = tl.sum((sums * tl.exp(tops - top)).to(tl.float64), axis=0)
    logit_ptr += row * stride
    SMALLEST: tl.constexpr = -(1 << (BITS - 1))
    smallest = tl.full([], SMALLEST, dtype=tl.int64)
    if top_k < vocabulary:
        low = tl.full([], SMALLEST - 1, dtype=tl.int64)
        high = tl.full([], -SMALLEST - 1, dtype=tl.int64)
        for _ in range(BITS + 1):
            middle = (low + high) >> 1
            count, weight = _above(logit_ptr, middle, temperature, top, vocabulary, CHUNK, BITS)
            low = tl.where(count < top_k, low, middle)
            high = tl.where(count < top_k, middle, high)
        smallest = tl.maximum(high, SMALLEST)
        # Of several tokens at the edge all stay, but top-p counts no more than k.
        count, weight = _above(logit_ptr, smallest, temperature, top, vocabulary, CHUNK, BITS)
        edge = tl.exp(_value(smallest, BITS) / temperature - top).to(tl.float64)
        left = weight + (top_k - count).to(tl.float64) * edge
    if top_p < 1.0:
        wanted = top_p * left
        low = tl.full([], SMALLEST - 1, dtype=tl.int64)
        high = tl.full([], -SMALLEST - 1, dtype=tl.int64)
        for _ in range(BITS + 1):
            middle = (low + high) >> 1
            count, weight = _above(logit_ptr, middle, temperature, top, vocabulary, CHUNK, BITS)
            low = tl.where(weight < wanted, low, middle)
            high = tl.where(weight < wanted, middle, high)
        smallest = tl.maximum(high, smallest)
    everything = smallest == SMALLEST
    tl.store(threshold_ptr + row, tl.where(everything, float("-inf"), _value(smallest, BITS)))
    tl.store(row_top_ptr + row, top)


@triton.jit
def _kept_kernel(
    logit_ptr,
    slot_ptr,
    temperature_ptr,
    min_p_ptr,
    top_ptr,
    threshold_ptr,
    row_top_ptr,
    kept_ptr,
    stride,
    vocabulary,
    num_blocks,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * EACH + tl.arange(0, EACH)
    inside = blocks < num_blocks
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(slot_ptr + row)
    logits = tl.load(logit_ptr + row * stride + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    scores = logits / tl.load(temperature_ptr + slot)
    weights = tl.exp(scores - tl.load(row_top_ptr + row))
    kept = stays(logits, weights, tl.load(threshold_ptr + row), tl.load(min_p_ptr + slot))
    top = tl.load(top_ptr + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    safe_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.where(kept, tl.exp(scores - safe_top[:, None]), 0.0), axis=1)
    tl.store(kept_ptr + row * num_blocks + blocks, total, mask=inside)
