"""Matrix products with a decoder layer's weights where one library call per weight leaves the device idle.

A library's product of few rows with a narrow weight fills a fraction of the multiprocessors. Here the three projections
of attention are one launch over three weights, so the weights stay the tensors they are; for small batches the gated
feed-forward is one launch, and long sums are cut among programs and added up inside the norm that follows. Anything
else (many rows, other dtypes, biases) goes to the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.layer import add_rms_norm, silu_mul

# Above so many rows the library is faster.
_MAX_ROWS_QKV = 1024
_MAX_ROWS_SMALL = 64
# Programs that keep the device's memory busy when weights are read once.
_PROGRAMS = 336


def project_qkv(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (rows, width) times the query, key and value weights (out, width), plus their biases (all or none)."""
    query_weight, key_weight, value_weight = weights
    rows, width = x.shape
    block_rows, block_columns, deepest, warps, stages = _qkv_blocks(rows)
    block_width = math.gcd(width, deepest)
    fits = block_width >= 64 and all(weight.shape[0] % block_columns == 0 for weight in weights)
    if rows > _MAX_ROWS_QKV or not _is_half(x) or not fits or key_weight.shape != value_weight.shape:
        query, key, value = (F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        return query, key, value
    query, key, value = (x.new_empty(rows, weight.shape[0]) for weight in weights)
    num_columns = sum(weight.shape[0] for weight in weights)
    has_bias = biases[0] is not None
    _qkv_kernel[(num_columns // block_columns, triton.cdiv(rows, block_rows))](
        x,
        query_weight,
        key_weight,
        value_weight,
        *(biases if has_bias else (x, x, x)),
        query,
        key,
        value,
        rows,
        query_weight.shape[0],
        key_weight.shape[0],
        WIDTH=width,
        ROWS=block_rows,
        COLUMNS=block_columns,
        DEPTH=block_width,
        BIAS=has_bias,
        num_warps=warps,
        num_stages=stages,
    )
    return query, key, value


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x times gate) * (x times up); the weights are (out, width)."""
    rows, width = x.shape
    columns, depth = 32, 64
    if rows > _MAX_ROWS_SMALL or not _is_half(x) or gate.shape[0] % columns or width % depth:
        return silu_mul(F.linear(x, gate), F.linear(x, up))
    out = x.new_empty(rows, gate.shape[0])
    _gated_kernel[(gate.shape[0] // columns,)](
        x,
        gate,
        up,
        out,
        rows,
        gate.shape[0],
        WIDTH=width,
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=4,
        num_stages=5,
    )
    return out


def linear_add_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x times `weight` (out, width) to `residual` in place, and return its normalised rows."""
    rows, width = x.shape
    columns, depth = 32, 64
    num_out = weight.shape[0]
    if rows > _MAX_ROWS_SMALL or not _is_half(x) or num_out % columns or width % depth:
        return add_rms_norm(F.linear(x, weight), residual, norm, eps)
    num_parts = max(1, min(width // depth // 2, 16, _PROGRAMS // (num_out // columns)))
    depth_each = triton.cdiv(width // depth, num_parts) * depth
    num_parts = triton.cdiv(width, depth_each)
    parts = x.new_empty((num_parts, rows, num_out), dtype=torch.float32)
    _parts_kernel[(num_out // columns, num_parts)](
        x,
        weight,
        parts,
        rows,
        num_out,
        depth_each,
        WIDTH=width,
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=4,
        num_stages=5,
    )
    out = torch.empty_like(residual)
    _parts_norm_kernel[(rows,)](
        parts,
        residual,
        norm,
        out,
        eps,
        rows,
        WIDTH=num_out,
        PADDED=triton.next_power_of_2(num_out),
        PARTS=num_parts,
        num_warps=8,
    )
    return out


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def _qkv_blocks(rows: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile, warps, stages: measured on an H200 for the 1.5B shape."""
    if rows <= 64:
        return max(16, triton.next_power_of_2(rows)), 32, 128, 4, 4
    if rows <= 128:
        return 64, 32, 128, 4, 4
    if rows <= 256:
        return 64, 64, 128, 4, 4
    if rows <= 512:
        return 128, 64, 64, 8, 4
    return 128, 128, 64, 8, 4


@triton.jit
def _qkv_kernel(
    x_ptr,
    query_weight_ptr,
    key_weight_ptr,
    value_weight_ptr,
    query_bias_ptr,
    key_bias_ptr,
    value_bias_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    num_rows,
    num_query,
    num_key,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
):
    first = tl.program_id(0) * COLUMNS
    if first < num_query:
        weight_ptr, bias_ptr, out_ptr, count = query_weight_ptr, query_bias_ptr, query_ptr, num_query
    elif first < num_query + num_key:
        weight_ptr, bias_ptr, out_ptr, count = key_weight_ptr, key_bias_ptr, key_ptr, num_key
        first -= num_query
    else:
        weight_ptr, bias_ptr, out_ptr, count = value_weight_ptr, value_bias_ptr, value_ptr, num_key
        first -= num_query + num_key
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = first + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside = rows[:, None] < num_rows
    x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
    weight_tile = weight_ptr + columns[None, :] * WIDTH + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(0, WIDTH, DEPTH):
        acc = tl.dot(tl.load(x_tile, mask=inside, other=0.0), tl.load(weight_tile), acc)
        x_tile += DEPTH
        weight_tile += DEPTH
    if BIAS:
        acc += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    tl.store(out_ptr + rows[:, None] * count + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    num_rows,
    num_out,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside = rows[:, None] < num_rows
    x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
    gate_tile = gate_ptr + columns[None, :] * WIDTH + depth[:, None]
    up_tile = up_ptr + columns[None, :] * WIDTH + depth[:, None]
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(0, WIDTH, DEPTH):
        x = tl.load(x_tile, mask=inside, other=0.0)
        gate = tl.dot(x, tl.load(gate_tile), gate)
        up = tl.dot(x, tl.load(up_tile), up)
        x_tile += DEPTH
        gate_tile += DEPTH
        up_tile += DEPTH
    dtype = x_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows[:, None] * num_out + columns[None, :], out, mask=inside)


@triton.jit
def _parts_kernel(
    x_ptr,
    weight_ptr,
    part_ptr,
    num_rows,
    num_out,
    depth_each,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows[:, None] < num_rows
    first = part * depth_each
    last = tl.minimum(first + depth_each, WIDTH)
    depth = first + tl.arange(0, DEPTH)
    x_tile = x_ptr + rows[:, None] * WIDTH + depth[None, :]
    weight_tile = weight_ptr + columns[None, :] * WIDTH + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(first, last, DEPTH):
        acc = tl.dot(tl.load(x_tile, mask=inside, other=0.0), tl.load(weight_tile), acc)
        x_tile += DEPTH
        weight_tile += DEPTH
    out = part.to(tl.int64) * num_rows * num_out + rows[:, None] * num_out + columns[None, :]
    tl.store(part_ptr + out, acc, mask=inside)


@triton.jit
def _parts_norm_kernel(
    part_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    num_rows,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    dtype = residual_ptr.dtype.element_ty
    total = tl.zeros([PADDED], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + (part * num_rows + row) * WIDTH + columns, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    x = (total.to(dtype).to(tl.float32) + residual).to(dtype).to(tl.float32)
    tl.store(residual_ptr + row * WIDTH + columns, x.to(dtype), mask=mask)
    variance = tl.sum(x * x, axis=0) / WIDTH
    normed = (x * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (normed * weight).to(dtype), mask=mask)
