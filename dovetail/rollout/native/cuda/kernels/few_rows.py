"""A dense decoder layer for few rows in four launches beside attention's: norms, rotary, storing inside the products.

With few rows a step's time is that of reading the weights, and of beginning and ending some nine kernels a layer. Here
a norm is two factors of the product that follows: its weights multiply the product's input, its row factor the result.
Both come from the product before, which adds to the residual: where a long sum is cut among programs, the one that ends
last adds up the parts, in their order. Programs to spare ask for weights that later kernels read, so that the memory is
busy while attention runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.layer import store_entry

MAX_ROWS = 64
# A residual times the weights of a norm may be too large a number for float16.
DTYPES = frozenset({torch.bfloat16})
_COLUMNS = 32
_DEPTH = 64
# Programs that keep the device's memory busy when weights are read once.
_PROGRAMS = 336
# Programs that ask for weights, and bytes each of their threads asks for at a time.
_ASKING = 32
_CHUNK = tl.constexpr(4096)
_THREADS = tl.constexpr(128)


class Scaled(NamedTuple):
    """The residual on its way into a norm: times the norm's weights, and its squares for the factor of each row."""

    x: torch.Tensor
    squares: torch.Tensor
    """(width / 32, rows): sums over 32 columns each."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Weights that a later kernel reads, and how many of their bytes to ask for now."""

    weights: Sequence[torch.Tensor] = ()
    max_bytes: int = 0

    def spans(self, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        """At most three tensors with the chunks to ask for, `max_bytes` divided among them by their sizes."""
        total = sum(weight.nbytes for weight in self.weights)
        if not total or not self.max_bytes or not _can_ask(device):
            return []
        share = min(1.0, self.max_bytes / total)
        return [(weight, int(weight.nbytes * share) // _CHUNK.value) for weight in self.weights]


NOTHING = Ahead()


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
    ahead: Ahead = NOTHING,
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
    tiles = (num_heads + 2 * num_kv) * (head_size // _COLUMNS)
    spans = ahead.spans(x.device)
    _norm_qkv_kernel[(tiles + _asking(spans),)](
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
        *_span_arguments(spans, x),
        eps,
        rows,
        WIDTH=width,
        BLOCKS=squares.shape[0],
        BLOCKS_PADDED=triton.next_power_of_2(squares.shape[0]),
        ROWS=_padded_rows(rows),
        HALF_COLUMNS=_COLUMNS // 2,
        DEPTH=_DEPTH if width % (2 * _DEPTH) else 2 * _DEPTH,
        HEAD=head_size,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        PAGE=page_size,
        BIAS=has_bias,
        ASKING=_asking(spans),
        num_warps=4,
        num_stages=4,
    )
    return query


def norm_gated(
    scaled: Scaled, eps: float, gate: torch.Tensor, up: torch.Tensor, ahead: Ahead = NOTHING
) -> torch.Tensor:
    """silu(x times gate) * (x times up) of the normed residual x; the weights are (out, width)."""
    x, squares = scaled
    rows, width = x.shape
    num_out = gate.shape[0]
    out = x.new_empty(rows, num_out)
    spans = ahead.spans(x.device)
    tiles = num_out // _COLUMNS
    _norm_gated_kernel[(tiles + _asking(spans),)](
        x,
        squares,
        gate,
        up,
        out,
        *_span_arguments(spans, x),
        eps,
        rows,
        num_out,
        WIDTH=width,
        BLOCKS=squares.shape[0],
        BLOCKS_PADDED=triton.next_power_of_2(squares.shape[0]),
        ROWS=_padded_rows(rows),
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        ASKING=_asking(spans),
        num_warps=4,
        num_stages=5,
    )
    return out


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    locks: torch.Tensor,
    ahead: Ahead = NOTHING,
) -> Scaled:
    """Add x times `weight` (out, width) to `residual` in place; return it on its way into the norm with these weights.

    `locks` are zeros, and zeros again when this is over: one for every 32 columns.
    """
    rows, width = x.shape
    num_out = weight.shape[0]
    tiles = num_out // _COLUMNS
    num_parts = max(1, min(width // _DEPTH // 2, 16, _PROGRAMS // tiles))
    depth_each = triton.cdiv(width // _DEPTH, num_parts) * _DEPTH
    num_parts = triton.cdiv(width, depth_each)
    parts = x.new_empty((num_parts, rows, num_out), dtype=torch.float32)
    squares = x.new_empty((tiles, rows), dtype=torch.float32)
    out = torch.empty_like(residual)
    spans = ahead.spans(x.device)
    _linear_add_kernel[(tiles * num_parts + _asking(spans),)](
        x,
        weight,
        parts,
        residual,
        norm,
        out,
        squares,
        locks,
        *_span_arguments(spans, x),
        rows,
        num_out,
        depth_each,
        tiles,
        WIDTH=width,
        PARTS=num_parts,
        ROWS=_padded_rows(rows),
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        ASKING=_asking(spans),
        num_warps=4,
        num_stages=5,
    )
    return Scaled(out, squares)


@lru_cache(maxsize=16)
def _can_ask(device: torch.device) -> bool:
    """Asking for many bytes at once is an instruction of NVIDIA's since Hopper."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _padded_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _asking(spans: list[tuple[torch.Tensor, int]]) -> int:
    return _ASKING if spans else 0


def _span_arguments(spans: list[tuple[torch.Tensor, int]], anything: torch.Tensor) -> list[torch.Tensor | int]:
    filled = [*spans, *[(anything, 0)] * (3 - len(spans))]
    return [*(tensor for tensor, _ in filled), *(count for _, count in filled)]


@triton.jit
def _ask(ptr, num_chunks, program, ASKING: tl.constexpr):
    """Bring the first chunks into the L2 cache. Nothing waits for them."""
    base = ptr.to(tl.int64)
    for first in range(program * _THREADS, num_chunks, ASKING * _THREADS):
        chunk = tl.minimum(first + tl.arange(0, _THREADS), num_chunks - 1)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.b32 $0, 0;",
            "=r,l",
            [base + chunk.to(tl.int64) * _CHUNK],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _norm_factors(
    squares_ptr,
    eps,
    rows,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    blocks = tl.arange(0, BLOCKS_PADDED)
    mask = (blocks[:, None] < BLOCKS) & (rows[None, :] < num_rows)
    squares = tl.load(squares_ptr + blocks[:, None] * num_rows + rows[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)


@triton.jit
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


@triton.jit
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
    first_ahead_ptr,
    second_ahead_ptr,
    third_ahead_ptr,
    num_first,
    num_second,
    num_third,
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
    ASKING: tl.constexpr,
):
    program = tl.program_id(0) - ASKING
    if program < 0:
        asker = program + ASKING
        _ask(first_ahead_ptr, num_first, asker, ASKING)
        _ask(second_ahead_ptr, num_second, asker, ASKING)
        _ask(third_ahead_ptr, num_third, asker, ASKING)
    else:
        HALF: tl.constexpr = HEAD // 2
        TILES: tl.constexpr = HALF // HALF_COLUMNS
        dtype: tl.constexpr = x_ptr.dtype.element_ty
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
        weight_tile = weight_ptr + (first + low_columns)[None, :] * WIDTH + depth[:, None]
        low = tl.zeros([ROWS, HALF_COLUMNS], dtype=tl.float32)
        high = tl.zeros([ROWS, HALF_COLUMNS], dtype=tl.float32)
        for _ in range(0, WIDTH, DEPTH):
            x = tl.load(x_tile, mask=inside, other=0.0)
            low = tl.dot(x, tl.load(weight_tile), low)
            high = tl.dot(x, tl.load(weight_tile + HALF * WIDTH), high)
            x_tile += DEPTH
            weight_tile += DEPTH
        factor = _norm_factors(squares_ptr, eps, rows, num_rows, WIDTH, BLOCKS, BLOCKS_PADDED)[:, None]
        low *= factor
        high *= factor
        if BIAS:
            low += tl.load(bias_ptr + first + low_columns).to(tl.float32)[None, :]
            high += tl.load(bias_ptr + first + HALF + low_columns).to(tl.float32)[None, :]
        low = low.to(dtype).to(tl.float32)
        high = high.to(dtype).to(tl.float32)
        if head < NUM_HEADS + NUM_KV:
            position = tl.load(position_ptr + rows, mask=rows < num_rows, other=0)
            angles = position[:, None] * HEAD + low_columns[None, :]
            cos_low = tl.load(cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
            cos_high = tl.load(cos_ptr + angles + HALF, mask=inside, other=0.0).to(tl.float32)
            sin_low = tl.load(sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)
            sin_high = tl.load(sin_ptr + angles + HALF, mask=inside, other=0.0).to(tl.float32)
            # Each product is rounded before the sum, as the modules do it.
            new_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
            high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
            low = new_low
        if head < NUM_HEADS:
            out = rows[:, None] * (NUM_HEADS * HEAD) + head * HEAD + low_columns[None, :]
            tl.store(query_ptr + out, low.to(dtype), mask=inside)
            tl.store(query_ptr + out + HALF, high.to(dtype), mask=inside)
        else:
            target = tl.load(target_ptr + rows, mask=rows < num_rows, other=-1)
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


@triton.jit
def _norm_gated_kernel(
    x_ptr,
    squares_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    first_ahead_ptr,
    second_ahead_ptr,
    third_ahead_ptr,
    num_first,
    num_second,
    num_third,
    eps,
    num_rows,
    num_out,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ASKING: tl.constexpr,
):
    program = tl.program_id(0) - ASKING
    if program < 0:
        asker = program + ASKING
        _ask(first_ahead_ptr, num_first, asker, ASKING)
        _ask(second_ahead_ptr, num_second, asker, ASKING)
        _ask(third_ahead_ptr, num_third, asker, ASKING)
    else:
        rows = tl.arange(0, ROWS)
        columns = program * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        inside = rows[:, None] < num_rows
        x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
        gate_tile = gate_ptr + columns[None, :] * WIDTH + depth[:, None]
        up_tile = up_ptr + columns[None, :] * WIDTH + depth[:, None]
        gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for _ in range(0, WIDTH, DEPTH):
            x = tl.load(x_tile, mask=inside, other=0.0)
            gate = tl.dot(x, tl.load(gate_tile, eviction_policy="evict_first"), gate)
            up = tl.dot(x, tl.load(up_tile, eviction_policy="evict_first"), up)
            x_tile += DEPTH
            gate_tile += DEPTH
            up_tile += DEPTH
        factor = _norm_factors(squares_ptr, eps, rows, num_rows, WIDTH, BLOCKS, BLOCKS_PADDED)[:, None]
        gate = (gate * factor).to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = (activated * (up * factor).to(dtype).to(tl.float32)).to(dtype)
        tl.store(out_ptr + rows[:, None] * num_out + columns[None, :], out, mask=inside)


@triton.jit
def _linear_add_kernel(
    x_ptr,
    weight_ptr,
    part_ptr,
    residual_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    lock_ptr,
    first_ahead_ptr,
    second_ahead_ptr,
    third_ahead_ptr,
    num_first,
    num_second,
    num_third,
    num_rows,
    num_out,
    depth_each,
    num_tiles,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ASKING: tl.constexpr,
):
    program = tl.program_id(0) - ASKING
    if program < 0:
        asker = program + ASKING
        _ask(first_ahead_ptr, num_first, asker, ASKING)
        _ask(second_ahead_ptr, num_second, asker, ASKING)
        _ask(third_ahead_ptr, num_third, asker, ASKING)
    else:
        tile = program % num_tiles
        part = program // num_tiles
        rows = tl.arange(0, ROWS)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = rows[:, None] < num_rows
        first = part * depth_each
        last = tl.minimum(first + depth_each, WIDTH)
        depth = first + tl.arange(0, DEPTH)
        x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
        weight_tile = weight_ptr + columns[None, :] * WIDTH + depth[:, None]
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for _ in range(first, last, DEPTH):
            weight = tl.load(weight_tile, eviction_policy="evict_first")
            acc = tl.dot(tl.load(x_tile, mask=inside, other=0.0), weight, acc)
            x_tile += DEPTH
            weight_tile += DEPTH
        place = rows[:, None] * num_out + columns[None, :]
        part_size = num_rows * num_out
        tl.store(part_ptr + part * part_size + place, acc, mask=inside)
        # All of this program's part is written before it counts as arrived.
        tl.debug_barrier()
        if tl.atomic_add(lock_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for index in tl.static_range(PARTS):
                total += tl.load(part_ptr + index * part_size + place, mask=inside, other=0.0, cache_modifier=".cg")
            dtype: tl.constexpr = residual_ptr.dtype.element_ty
            before = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
            x = (total.to(dtype).to(tl.float32) + before).to(dtype)
            tl.store(residual_ptr + place, x, mask=inside)
            wide = x.to(tl.float32)
            norm = tl.load(norm_ptr + columns).to(tl.float32)
            tl.store(scaled_ptr + place, (wide * norm[None, :]).to(dtype), mask=inside)
            tl.store(squares_ptr + tile * num_rows + rows, tl.sum(wide * wide, axis=1), mask=rows < num_rows)
            tl.store(lock_ptr + tile, 0)
