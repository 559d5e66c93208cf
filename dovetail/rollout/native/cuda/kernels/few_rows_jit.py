"""The kernels of `few_rows`, which says what they compute and how they are cut."""

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.layer import store_entry
from dovetail.rollout.native.cuda.kernels.overlap import follow


@triton.jit
def _times(x, weight, acc, SWAP: tl.constexpr):
    """acc + x times weight (columns, depth); acc is (columns, rows) where swapped."""
    if SWAP:
        return tl.dot(weight, tl.trans(x), acc)
    else:
        return tl.dot(x, tl.trans(weight), acc)


@triton.jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    else:
        return tl.zeros([ROWS, COLUMNS], dtype=tl.float32)


@triton.jit
def _upright(acc, SWAP: tl.constexpr):
    if SWAP:
        return tl.trans(acc)
    else:
        return acc


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
    SWAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    HALF: tl.constexpr = HEAD // 2
    TILES: tl.constexpr = HALF // HALF_COLUMNS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    head = program // TILES
    # The columns of a head that rotate together are half a head apart.
    low_columns = (program % TILES) * HALF_COLUMNS + tl.arange(0, HALF_COLUMNS)
    if head < NUM_HEADS:
        weight_ptr, bias_ptr, first = query_weight_ptr, query_bias_ptr, head * HEAD
    elif head < NUM_HEADS + NUM_KV:
        weight_ptr, bias_ptr, first = key_weight_ptr, key_bias_ptr, (head - NUM_HEADS) * HEAD
    else:
        weight_ptr, bias_ptr, first = value_weight_ptr, value_bias_ptr, (head - NUM_HEADS - NUM_KV) * HEAD
    rows = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    inside = rows[:, None] < num_rows
    x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
    weight_rows = weight_ptr + (first + low_columns)[:, None] * WIDTH
    position = tl.load(position_ptr + rows, mask=rows < num_rows, other=0)
    target = tl.load(target_ptr + rows, mask=rows < num_rows, other=-1)
    angles = position[:, None] * HEAD + low_columns[None, :]
    cos_low = tl.load(cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    low_bias = _bias(bias_ptr + first + low_columns, BIAS)
    high_bias = _bias(bias_ptr + first + HALF + low_columns, BIAS)
    follow(OVERLAP)
    squares = _squares(squares_ptr, rows, num_rows, BLOCKS, BLOCKS_PADDED)
    weight_tile = weight_rows + depth[None, :]
    low = _nothing(ROWS, HALF_COLUMNS, SWAP)
    high = _nothing(ROWS, HALF_COLUMNS, SWAP)
    for _ in range(0, WIDTH, DEPTH):
        x = tl.load(x_tile, mask=inside, other=0.0)
        low = _times(x, tl.load(weight_tile), low, SWAP)
        high = _times(x, tl.load(weight_tile + HALF * WIDTH), high, SWAP)
        x_tile += DEPTH
        weight_tile += DEPTH
    factor = _norm_factors(squares, eps, WIDTH)
    low = _upright(low, SWAP) * factor + low_bias
    high = _upright(high, SWAP) * factor + high_bias
    low = low.to(dtype).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
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
    SWAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    inside = rows[:, None] < num_rows
    x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
    gate_rows = gate_ptr + columns[:, None] * WIDTH
    up_rows = up_ptr + columns[:, None] * WIDTH
    follow(OVERLAP)
    squares = _squares(squares_ptr, rows, num_rows, BLOCKS, BLOCKS_PADDED)
    gate_tile = gate_rows + depth[None, :]
    up_tile = up_rows + depth[None, :]
    gate = _nothing(ROWS, COLUMNS, SWAP)
    up = _nothing(ROWS, COLUMNS, SWAP)
    for _ in range(0, WIDTH, DEPTH):
        x = tl.load(x_tile, mask=inside, other=0.0)
        gate = _times(x, tl.load(gate_tile, eviction_policy="evict_first"), gate, SWAP)
        up = _times(x, tl.load(up_tile, eviction_policy="evict_first"), up, SWAP)
        x_tile += DEPTH
        gate_tile += DEPTH
        up_tile += DEPTH
    factor = _norm_factors(squares, eps, WIDTH)
    gate = (_upright(gate, SWAP) * factor).to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (activated * (_upright(up, SWAP) * factor).to(dtype).to(tl.float32)).to(dtype)
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
    SWAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows[:, None] < num_rows
    first = part * depth_each
    last = tl.minimum(first + depth_each, WIDTH)
    depth = first + tl.arange(0, DEPTH)
    x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
    weight_rows = weight_ptr + columns[:, None] * WIDTH
    # Neither is written by the kernel before this one.
    place = rows[:, None] * num_out + columns[None, :]
    before = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + columns).to(tl.float32)
    follow(OVERLAP)
    weight_tile = weight_rows + depth[None, :]
    acc = _nothing(ROWS, COLUMNS, SWAP)
    for _ in range(first, last, DEPTH):
        weight = tl.load(weight_tile, eviction_policy="evict_first")
        acc = _times(tl.load(x_tile, mask=inside, other=0.0), weight, acc, SWAP)
        x_tile += DEPTH
        weight_tile += DEPTH
    total = _upright(acc, SWAP)
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
