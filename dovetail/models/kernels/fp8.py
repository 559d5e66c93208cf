"""A Triton kernel that scales a matrix, casts it to e4m3 and writes it transposed. Needs CUDA."""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

_ROWS, _COLUMNS = 128, 64  # of a tile: 128 bytes in a line that is read, and in one that is written


def cast_transposed_triton(x: Tensor, scale: Tensor, padded_rows: int) -> Tensor:
    """`[rows, columns]` to `[columns, padded_rows]`, divided by the one number in `scale`, a power of two."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(columns, padded_rows, device=x.device, dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(padded_rows, _ROWS))
    _cast_kernel[grid](x, scale, out, rows, padded_rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return out


@triton.jit
def _cast_kernel(x, scale, out, rows, padded_rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    cast = (values.to(tl.float32) * (1.0 / tl.load(scale))).to(tl.float8e4nv)
    place = out + column[:, None].to(tl.int64) * padded_rows + row[None, :]
    tl.store(place, tl.trans(cast), mask=(column[:, None] < columns) & (row[None, :] < padded_rows))
