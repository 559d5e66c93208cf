"""A dense decoder layer for few rows in four launches beside attention's: norms, rotary, storing inside the products.

With few rows a step's time is that of reading the weights, and of beginning and ending some nine kernels a layer. Here
a norm is two factors of the product that follows: its weights multiply the product's input, its row factor the result.
Both come from the product before, which adds to the residual: where a long sum is cut among programs, the one that ends
last adds up the parts, in their order. Each kernel begins while the one before it ends, and reads what does not depend
on it meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.layer import store_entry
from dovetail.rollout.native.cuda.kernels.overlap import follow, launch_options, overlaps

MAX_ROWS = 64
# A residual times the weights of a norm may be too large a number for float16.
DTYPES = frozenset({torch.bfloat16})
# What all products are multiples of.
_COLUMNS = 32
_DEPTH = 64
_MAX_STAGES = 6
_SHARED_BYTES = 200 << 10


class Cut(NamedTuple):
    """How a product is cut among programs: columns of the result each, and a share of the sum."""

    columns: int
    depth: int
    """Of the tiles that are multiplied at a time."""
    warps: int
    stages: int
    programs: int = 0
    """A long sum is cut so that there are about so many."""
    swap: bool = True
    """Weights on the left: their columns fill the tensor cores where rows do not."""


# By the most rows: what was fastest of some fifteen each on an H200 at the 1.5B shape.
_CUTS = {
    "qkv": {8: Cut(16, 256, 2, 6), 32: Cut(16, 512, 2, 3), 64: Cut(16, 128, 4, 4)},
    "gated": {16: Cut(32, 128, 4, 3, swap=False), 64: Cut(64, 64, 4, 4)},
    "out": {8: Cut(32, 128, 2, 4, 192), 32: Cut(16, 512, 2, 3, 96), 64: Cut(64, 128, 4, 4, 48)},
    "down": {8: Cut(32, 64, 2, 6, 336), 32: Cut(32, 128, 2, 4, 264), 64: Cut(64, 128, 4, 4, 132)},
}


class Scaled(NamedTuple):
    """The residual on its way into a norm: times the norm's weights, and its squares for the factor of each row."""

    x: torch.Tensor
    squares: torch.Tensor
    """(blocks of columns, rows): sums over as many columns each."""


def runs_on(device: torch.device) -> bool:
    """Whether the tiles fit into a multiprocessor's memory: on Hopper and the large cards of Blackwell."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin >= _SHARED_BYTES


def fits(width: int, *outs: int) -> bool:
    """Whether products of this depth with so many results each can be cut as the kernels cut them."""
    return width % _DEPTH == 0 and all(out % _COLUMNS == 0 for out in outs)


def head_fits(head_size: int) -> bool:
    return head_size % _COLUMNS == 0


def embed(tokens: torch.Tensor, table: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, Scaled]:
    """The tokens' rows of `table`, and the same on their way into the norm with these weights."""
    rows, width = tokens.shape[0], table.shape[1]
    blocks = width // _COLUMNS
    residual, x = table.new_empty((rows, width)), table.new_empty((rows, width))
    squares = table.new_empty((blocks, rows), dtype=torch.float32)
    _embed_kernel[(rows,)](
        tokens,
        table,
        norm,
        residual,
        x,
        squares,
        rows,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return residual, Scaled(x, squares)


def norm_qkv(
    scaled: Scaled,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    rotation: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """The rotated queries of the normed residual; its rotated keys and its values go to the pages.

    `rotation` is cosine and sine (positions, head size) of all positions; `targets` are those of `rotate_and_store`.
    """
    x, squares = scaled
    rows, width = x.shape
    _, num_kv, page_size, head_size = keys.shape
    query_weight, key_weight, value_weight = weights
    num_heads = query_weight.shape[0] // head_size
    query = x.new_empty(rows, query_weight.shape[0])
    has_bias = biases[0] is not None
    cut = _cut_for("qkv", rows, width, head_size // 2)
    tiles = (num_heads + 2 * num_kv) * (head_size // 2 // cut.columns)
    overlap = overlaps(x.device)
    _norm_qkv_kernel[(tiles,)](
        x,
        squares,
        query_weight,
        key_weight,
        value_weight,
        *(biases if has_bias else (x, x, x)),
        query,
        keys,
        values,
        targets,
        positions,
        *rotation,
        eps,
        rows,
        WIDTH=width,
        BLOCKS=squares.shape[0],
        BLOCKS_PADDED=triton.next_power_of_2(squares.shape[0]),
        ROWS=_padded_rows(rows, cut),
        HALF_COLUMNS=cut.columns,
        DEPTH=cut.depth,
        HEAD=head_size,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        PAGE=page_size,
        BIAS=has_bias,
        SWAP=cut.swap,
        OVERLAP=overlap,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(overlap),
    )
    return query


def norm_gated(scaled: Scaled, eps: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x times gate) * (x times up) of the normed residual x; the weights are (out, width)."""
    x, squares = scaled
    rows, width = x.shape
    num_out = gate.shape[0]
    out = x.new_empty(rows, num_out)
    cut = _cut_for("gated", rows, width, num_out)
    overlap = overlaps(x.device)
    _norm_gated_kernel[(num_out // cut.columns,)](
        x,
        squares,
        gate,
        up,
        out,
        eps,
        rows,
        num_out,
        WIDTH=width,
        BLOCKS=squares.shape[0],
        BLOCKS_PADDED=triton.next_power_of_2(squares.shape[0]),
        ROWS=_padded_rows(rows, cut),
        COLUMNS=cut.columns,
        DEPTH=cut.depth,
        SWAP=cut.swap,
        OVERLAP=overlap,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(overlap),
    )
    return out


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, locks: torch.Tensor
) -> Scaled:
    """Add x times `weight` (out, width) to `residual` in place; return it on its way into the norm with these weights.

    `locks` are zeros, and zeros again when this is over: one for every 16 columns.
    """
    rows, width = x.shape
    num_out = weight.shape[0]
    kind = "down" if width > 2 * num_out else "out"
    cut = _cut_for(kind, rows, width, num_out)
    tiles = num_out // cut.columns
    num_parts = max(1, min(width // cut.depth // 2, 16, cut.programs // tiles))
    depth_each = triton.cdiv(width // cut.depth, num_parts) * cut.depth
    num_parts = triton.cdiv(width, depth_each)
    parts = x.new_empty((num_parts, rows, num_out) if num_parts > 1 else 1, dtype=torch.float32)
    squares = x.new_empty((tiles, rows), dtype=torch.float32)
    out = torch.empty_like(residual)
    overlap = overlaps(x.device)
    _linear_add_kernel[(tiles, num_parts)](
        x,
        weight,
        parts,
        residual,
        norm,
        out,
        squares,
        locks,
        rows,
        num_out,
        depth_each,
        WIDTH=width,
        PARTS=num_parts,
        ROWS=_padded_rows(rows, cut),
        COLUMNS=cut.columns,
        DEPTH=cut.depth,
        SWAP=cut.swap,
        OVERLAP=overlap,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(overlap),
    )
    return Scaled(out, squares)


def _cut_for(kind: str, rows: int, width: int, num_out: int) -> Cut:
    cut = next(cut for most, cut in _CUTS[kind].items() if rows <= most)
    columns = cut.columns if num_out % cut.columns == 0 else _COLUMNS
    depth = math.gcd(width, cut.depth)
    return cut._replace(columns=columns, depth=depth, stages=min(_MAX_STAGES, cut.stages * cut.depth // depth))


def _padded_rows(rows: int, cut: Cut) -> int:
    return max(8 if cut.swap else 16, triton.next_power_of_2(rows))


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
def _embed_kernel(
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
def _norm_qkv_kernel(
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
def _norm_gated_kernel(
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
def _linear_add_kernel(
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
