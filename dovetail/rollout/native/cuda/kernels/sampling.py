"""Draw each row's next token and its log-prob in one pass over the logits; more passes where rows are filtered.

The same race, with the same random numbers, as `dovetail.rollout.native.sampler`: blocks of 128 tokens by their total
weight, then tokens inside the winning block. So the one pass over the logits needs only each block's maximum and sum,
and a row draws V/128 + 128 random numbers instead of V.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.filtering import Kept, keep, stays
from dovetail.rollout.native.cuda.slots import SlotState
from dovetail.rollout.native.sampler import BLOCK

# Blocks per program of the pass over the logits: 4096 logits each.
_BLOCKS_EACH = 32
# Of the race: a thread's random numbers, logarithms in double precision, come one after the other.
_RACE_WARPS = 16


def draw(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    state: SlotState,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    filtered: bool = False,
) -> None:
    """Write `tokens` (int64) and `log_probs` (float32) of rows drawn from logits (rows, vocabulary).

    `positions` is each row's last position so far; its new token stands one further, and that place picks the random
    numbers. Greedy rows must have temperature 1. `filtered`: some rows have top-k, top-p or min-p.
    """
    rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    tops = logits.new_empty((rows, num_blocks), dtype=torch.float32)
    sums = torch.empty_like(tops)
    _block_kernel[(rows, triton.cdiv(num_blocks, _BLOCKS_EACH))](
        logits,
        slots,
        state.temperatures,
        tops,
        sums,
        logits.stride(0),
        vocabulary,
        num_blocks,
        BLOCK=BLOCK,
        EACH=_BLOCKS_EACH,
        num_warps=4,
    )
    kept = Kept(sums, tops)
    if filtered:
        kept = keep(logits, slots, state, tops, sums, block=BLOCK, blocks_each=_BLOCKS_EACH)
    _race_kernel[(rows,)](
        logits,
        tops,
        sums,
        *kept,
        state.filters.min_p,
        state.filters.processed,
        positions,
        slots,
        state.keys,
        state.temperatures,
        state.greedy,
        tokens,
        log_probs,
        logits.stride(0),
        vocabulary,
        num_blocks,
        BLOCK=BLOCK,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        FILTERED=filtered,
        num_warps=_RACE_WARPS,
    )


@triton.jit
def _block_kernel(
    logit_ptr,
    slot_ptr,
    temperature_ptr,
    top_ptr,
    sum_ptr,
    stride,
    vocabulary,
    num_blocks,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * EACH + tl.arange(0, EACH)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    temperature = tl.load(temperature_ptr + tl.load(slot_ptr + row))
    scores = tl.load(logit_ptr + row * stride + columns, mask=columns < vocabulary, other=float("-inf"))
    scores = scores.to(tl.float32) / temperature
    top = tl.max(scores, axis=1)
    # A block past the end has no finite score; its sum must be 0, not NaN.
    safe_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(scores - safe_top[:, None]), axis=1)
    inside = blocks < num_blocks
    tl.store(top_ptr + row * num_blocks + blocks, top, mask=inside)
    tl.store(sum_ptr + row * num_blocks + blocks, total, mask=inside)


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fold(key, counter):
    return _mix(key + (counter + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)


@triton.jit
def _exponential(key, counter):
    bits = _fold(key, counter)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
    return -tl.log(uniform)


@triton.jit
def _race_kernel(
    logit_ptr,
    top_ptr,
    sum_ptr,
    kept_ptr,
    threshold_ptr,
    min_p_ptr,
    processed_ptr,
    position_ptr,
    slot_ptr,
    key_ptr,
    temperature_ptr,
    greedy_ptr,
    token_ptr,
    log_prob_ptr,
    stride,
    vocabulary,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    is_greedy = tl.load(greedy_ptr + slot) != 0
    position = tl.load(position_ptr + row).to(tl.int64) + 1
    key = _fold(tl.load(key_ptr + slot).to(tl.uint64, bitcast=True), position)

    blocks = tl.arange(0, BLOCKS_PADDED)
    inside = blocks < num_blocks
    tops = tl.load(top_ptr + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + blocks, mask=inside, other=0.0)
    top = tl.max(tops, axis=0)
    weights = (sums * tl.exp(tops - top)).to(tl.float64)
    total = tl.sum(weights, axis=0)
    if FILTERED:
        kept_sums = tl.load(kept_ptr + row * num_blocks + blocks, mask=inside, other=0.0)
        weights = (kept_sums * tl.exp(tops - top)).to(tl.float64)
        total = tl.where(tl.load(processed_ptr + slot) != 0, tl.sum(weights, axis=0), total)
    drawn = tl.argmax(weights / _exponential(key, blocks.to(tl.int64)), axis=0)
    block = tl.where(is_greedy, tl.argmax(tops, axis=0), drawn).to(tl.int64)

    offsets = tl.arange(0, BLOCK)
    columns = block * BLOCK + offsets
    logits = tl.load(logit_ptr + row * stride + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    scores = logits / temperature
    # Negative counters, so that the second round never repeats a number of the first.
    inner = _exponential(_fold(key, -2 - block), offsets.to(tl.int64))
    candidates = tl.exp(scores - top)
    if FILTERED:
        kept = stays(logits, candidates, tl.load(threshold_ptr + row), tl.load(min_p_ptr + slot))
        candidates = tl.where(kept, candidates, 0.0)
    raced = tl.argmax(candidates.to(tl.float64) / inner, axis=0)
    winner = tl.where(is_greedy, tl.argmax(scores, axis=0), raced)
    chosen = tl.sum(tl.where(offsets == winner, scores, 0.0), axis=0)
    # Logits that are not numbers have no winner; whatever comes out must still be a token.
    tl.store(token_ptr + row, tl.minimum(block * BLOCK + winner, vocabulary - 1))
    tl.store(log_prob_ptr + row, ((chosen - top).to(tl.float64) - tl.log(total)).to(tl.float32))
