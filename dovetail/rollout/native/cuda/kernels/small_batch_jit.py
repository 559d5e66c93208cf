"""The kernels of `small_batch`, which says what they compute and how they are cut."""

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.layer import store_entry
from dovetail.rollout.native.cuda.kernels.overlap import ask, follow


@triton.jit
def _tile(row_ptrs, first, SHARES: tl.constexpr, DEPTH: tl.constexpr):
    """Pointers to DEPTH values of each row from `first` on; with SHARES, one share of the depth after the other."""
    if SHARES == 1:
        return row_ptrs[:, None] + first + tl.arange(0, DEPTH)[None, :]
    else:
        EACH: tl.constexpr = DEPTH // SHARES
        shares = tl.arange(0, SHARES)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
        return row_ptrs[None, :, None] + first + shares


@triton.jit
def _of_rows(inside, SHARES: tl.constexpr):
    if SHARES == 1:
        return inside[:, None]
    else:
        return inside[None, :, None]


@triton.jit
def _times(x, weight, acc, SHARES: tl.constexpr, SWAP: tl.constexpr):
    """acc + x times weight (columns, depth); acc is (columns, rows) where swapped, one for each share of the depth."""
    if SHARES == 1:
        if SWAP:
            return tl.dot(weight, tl.trans(x), acc)
        else:
            return tl.dot(x, tl.trans(weight), acc)
    else:
        if SWAP:
            return tl.dot(weight, tl.trans(x, (0, 2, 1)), acc)
        else:
            return tl.dot(x, tl.trans(weight, (0, 2, 1)), acc)


@triton.jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr, SWAP: tl.constexpr):
    if SHARES == 1:
        if SWAP:
            return tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
        else:
            return tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    else:
        if SWAP:
            return tl.zeros([SHARES, COLUMNS, ROWS], dtype=tl.float32)
        else:
            return tl.zeros([SHARES, ROWS, COLUMNS], dtype=tl.float32)


@triton.jit
def _upright(acc, SHARES: tl.constexpr, SWAP: tl.constexpr):
    """(rows, columns), the shares added up."""
    total = acc if SHARES == 1 else tl.sum(acc, axis=0)
    if SWAP:
        return tl.trans(total)
    else:
        return total


@triton.jit
def _bias(ptrs, BIAS: tl.constexpr):
    if BIAS:
        return tl.load(ptrs).to(tl.float32)[None, :]
    else:
        return 0.0


@triton.jit
def _squares(squares_ptr, rows, num_rows, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr):
    blocks = tl.arange(0, BLOCKS_PADDED)
    mask = (blocks[:, None] < BLOCKS) & (rows[None, :] < num_rows)
    return tl.load(squares_ptr + blocks[:, None] * num_rows + rows[None, :], mask=mask, other=0.0)


@triton.jit
def _norm_factors(squares, eps, WIDTH: tl.constexpr):
    """What a norm multiplies each row by, as a column."""
    return tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def embed_kernel(
    token_ptr,
    table_ptr,
    norm_ptr,
    residual_ptr,
    scaled_ptr,
    squares_ptr,
    num_rows,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(token_ptr + row).to(tl.int64)
    blocks = tl.arange(0, PADDED)
    columns = blocks[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = blocks < BLOCKS
    x = tl.load(table_ptr + token * (BLOCKS * COLUMNS) + columns, mask=inside[:, None], other=0.0)
    place = row * (BLOCKS * COLUMNS) + columns
    tl.store(residual_ptr + place, x, mask=inside[:, None])
    wide = x.to(tl.float32)
    weight = tl.load(norm_ptr + columns, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(scaled_ptr + place, (wide * weight).to(x.dtype), mask=inside[:, None])
    tl.store(squares_ptr + blocks * num_rows + row, tl.sum(wide * wide, axis=1), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def norm_qkv_kernel(
    x_ptr,
    squares_ptr,
    query_weight_ptr,
    key_weight_ptr,
    value_weight_ptr,
    query_bias_ptr,
    key_bias_ptr,
    value_bias_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    target_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    PAGE: tl.constexpr,
    BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    SWAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    HALF: tl.constexpr = HEAD // 2
    TILES: tl.constexpr = HALF // HALF_COLUMNS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    head = program // TILES
    # The columns of a head that rotate together are half a head apart: here one after the other.
    low_columns = (program % TILES) * HALF_COLUMNS + tl.arange(0, HALF_COLUMNS)
    pairs = tl.arange(0, 2 * HALF_COLUMNS)
    both_columns = (program % TILES) * HALF_COLUMNS + pairs // 2 + (pairs % 2) * HALF
    if head < NUM_HEADS:
        weight_ptr, bias_ptr, first = query_weight_ptr, query_bias_ptr, head * HEAD
    elif head < NUM_HEADS + NUM_KV:
        weight_ptr, bias_ptr, first = key_weight_ptr, key_bias_ptr, (head - NUM_HEADS) * HEAD
    else:
        weight_ptr, bias_ptr, first = value_weight_ptr, value_bias_ptr, (head - NUM_HEADS - NUM_KV) * HEAD
    rows = tl.arange(0, ROWS)
    inside = rows[:, None] < num_rows
    row_mask = _of_rows(rows < num_rows, SHARES)
    x_rows = x_ptr + rows * WIDTH
    weight_rows = weight_ptr + (first + both_columns) * WIDTH
    position = tl.load(position_ptr + rows, mask=rows < num_rows, other=0)
    target = tl.load(target_ptr + rows, mask=rows < num_rows, other=-1)
    angles = position[:, None] * HEAD + low_columns[None, :]
    cos_low = tl.load(cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    bias = _bias(bias_ptr + first + both_columns, BIAS)
    follow(OVERLAP)
    squares = _squares(squares_ptr, rows, num_rows, BLOCKS, BLOCKS_PADDED)
    both = _nothing(ROWS, 2 * HALF_COLUMNS, SHARES, SWAP)
    x_tile = _tile(x_rows, 0, SHARES, DEPTH)
    weight_tile = _tile(weight_rows, 0, SHARES, DEPTH)
    for _ in range(0, WIDTH, DEPTH):
        x = tl.load(x_tile, mask=row_mask, other=0.0)
        both = _times(x, tl.load(weight_tile), both, SHARES, SWAP)
        x_tile += DEPTH
        weight_tile += DEPTH
    both = (_upright(both, SHARES, SWAP) * _norm_factors(squares, eps, WIDTH) + bias).to(dtype).to(tl.float32)
    low, high = tl.split(tl.reshape(both, (ROWS, HALF_COLUMNS, 2)))
    if head < NUM_HEADS + NUM_KV:
        # Each product is rounded before the sum, as the modules do it.
        new_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
        high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
        low = new_low
    if head < NUM_HEADS:
        out = rows[:, None] * (NUM_HEADS * HEAD) + head * HEAD + low_columns[None, :]
        tl.store(query_ptr + out, low.to(dtype), mask=inside)
        tl.store(query_ptr + out + HALF, high.to(dtype), mask=inside)
    else:
        stored = (target >= 0)[:, None]
        page = (target // PAGE).to(tl.int64)
        kv_head = (head - NUM_HEADS) % NUM_KV
        place = ((page * NUM_KV + kv_head) * PAGE + target % PAGE) * HEAD
        entry = place[:, None] + low_columns[None, :]
        if head < NUM_HEADS + NUM_KV:
            store_entry(keys_ptr + entry, low, stored, dtype)
            store_entry(keys_ptr + entry + HALF, high, stored, dtype)
        else:
            store_entry(values_ptr + entry, low, stored, dtype)
            store_entry(values_ptr + entry + HALF, high, stored, dtype)


@triton.jit(do_not_specialize=["num_rows"])
def norm_gated_kernel(
    x_ptr,
    squares_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    eps,
    num_rows,
    num_out,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARES: tl.constexpr,
    SWAP: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    inside = rows[:, None] < num_rows
    row_mask = _of_rows(rows < num_rows, SHARES)
    x_rows = x_ptr + rows * WIDTH
    gate_rows = gate_ptr + columns * WIDTH
    up_rows = up_ptr + columns * WIDTH
    ask(gate_rows[:, None], AHEAD)
    ask(up_rows[:, None], AHEAD)
    follow(OVERLAP)
    squares = _squares(squares_ptr, rows, num_rows, BLOCKS, BLOCKS_PADDED)
    gate = _nothing(ROWS, COLUMNS, SHARES, SWAP)
    up = _nothing(ROWS, COLUMNS, SHARES, SWAP)
    x_tile = _tile(x_rows, 0, SHARES, DEPTH)
    gate_tile = _tile(gate_rows, 0, SHARES, DEPTH)
    up_tile = _tile(up_rows, 0, SHARES, DEPTH)
    for _ in range(0, WIDTH, DEPTH):
        x = tl.load(x_tile, mask=row_mask, other=0.0)
        gate = _times(x, tl.load(gate_tile, eviction_policy="evict_first"), gate, SHARES, SWAP)
        up = _times(x, tl.load(up_tile, eviction_policy="evict_first"), up, SHARES, SWAP)
        x_tile += DEPTH
        gate_tile += DEPTH
        up_tile += DEPTH
    factor = _norm_factors(squares, eps, WIDTH)
    gate = _upright(gate, SHARES, SWAP) * factor
    out = (gate / (1.0 + tl.exp(-gate)) * (_upright(up, SHARES, SWAP) * factor)).to(dtype)
    tl.store(out_ptr + rows[:, None] * num_out + columns[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def linear_add_kernel(
    x_ptr,
    weight_ptr,
    part_ptr,
    residual_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    lock_ptr,
    num_rows,
    num_out,
    depth_each,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARES: tl.constexpr,
    SWAP: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows[:, None] < num_rows
    row_mask = _of_rows(rows < num_rows, SHARES)
    first = part * depth_each
    last = tl.minimum(first + depth_each, WIDTH)
    x_rows = x_ptr + rows * WIDTH
    weight_rows = weight_ptr + columns * WIDTH
    norm = tl.load(norm_ptr + columns).to(tl.float32)
    ask((weight_rows + first)[:, None], AHEAD)
    follow(OVERLAP)
    place = rows[:, None] * num_out + columns[None, :]
    before = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x_tile = _tile(x_rows, first, SHARES, DEPTH)
    weight_tile = _tile(weight_rows, first, SHARES, DEPTH)
    acc = _nothing(ROWS, COLUMNS, SHARES, SWAP)
    for _ in range(first, last, DEPTH):
        weight = tl.load(weight_tile, eviction_policy="evict_first")
        acc = _times(tl.load(x_tile, mask=row_mask, other=0.0), weight, acc, SHARES, SWAP)
        x_tile += DEPTH
        weight_tile += DEPTH
    total = _upright(acc, SHARES, SWAP)
    is_last = True
    if PARTS > 1:
        part_size = num_rows * num_out
        tl.store(part_ptr + part * part_size + place, total, mask=inside)
        # All of this program's part is written before it counts as arrived.
        tl.debug_barrier()
        is_last = tl.atomic_add(lock_ptr + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for index in tl.static_range(PARTS):
                total += tl.load(part_ptr + index * part_size + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(lock_ptr + tile, 0)
    if is_last:
        dtype: tl.constexpr = residual_ptr.dtype.element_ty
        x = (total.to(dtype).to(tl.float32) + before).to(dtype)
        tl.store(residual_ptr + place, x, mask=inside)
        wide = x.to(tl.float32)
        tl.store(scaled_ptr + place, (wide * norm[None, :]).to(dtype), mask=inside)
        tl.store(squares_ptr + tile * num_rows + rows, tl.sum(wide * wide, axis=1), mask=rows < num_rows)
