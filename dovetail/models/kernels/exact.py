"""Triton kernels whose result for a row does not depend on the other rows of the batch, nor on how many there are.

Tiles are the same for every shape, and every sum is taken in one order: along the contracted dimension from its
beginning, never split between programs. So a token has the same bits in a decode step of one row and in a training
batch of thousands.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
_GROUP = 8  # tiles of rows that share the columns of a weight in the cache
_SCORES = 4096  # logits at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x weight^T + bias` of x (rows, inputs), added up in float32 and returned as `dtype`."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(rows, outputs, dtype=dtype)
    if not rows:
        return out
    grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, _COLUMNS),)
    _linear_kernel[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        GROUP=_GROUP,
        num_warps=8,
        num_stages=3,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows of x (rows, width), rounded where transformers rounds."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        padded = triton.next_power_of_2(width)
        _norm_kernel[(rows,)](x, weight, out, eps, WIDTH=width, PADDED=padded, num_warps=4 if width <= 4096 else 8)
    return out


def label_log_probs(logits: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    """float32 log p(label) of each row of logits (rows, vocabulary) over its temperature."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_prob_kernel[(rows,)](
            logits, labels, temperatures, out, logits.stride(0), vocabulary, SCORES=_SCORES, num_warps=8
        )
    return out


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run side by side share columns of the weight. Which tile a program has changes no number in it.
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    group = program // (GROUP * column_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + program % (GROUP * column_tiles) % group_rows
    column_tile = program % (GROUP * column_tiles) // group_rows

    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (column_tile * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        inside = start + depth < INPUTS
        x = tl.load(
            x_ptr + row[:, None] * INPUTS + start + depth[None, :],
            mask=(row[:, None] < rows) & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + column[None, :] * INPUTS + start + depth[:, None],
            mask=(column[None, :] < outputs) & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row[:, None] * outputs + column[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < outputs))


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = (x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (weight * normed).to(dtype), mask=mask)


@triton.jit
def _log_prob_kernel(logit_ptr, label_ptr, temperature_ptr, out_ptr, stride, vocabulary, SCORES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logit_ptr += row * stride
    temperature = tl.load(temperature_ptr + row)
    columns = tl.arange(0, SCORES)
    top = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, SCORES):
        inside = start + columns < vocabulary
        logits = tl.load(logit_ptr + start + columns, mask=inside, other=float("-inf"))
        scores = logits.to(tl.float32) / temperature
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(scores - new_top), axis=0)
        top = new_top
    chosen = tl.load(logit_ptr + tl.load(label_ptr + row)).to(tl.float32) / temperature
    tl.store(out_ptr + row, chosen - top - tl.log(total))
