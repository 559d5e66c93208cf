"""A dense decoder layer for small batches in four launches beside attention's: norms, rotary, storing inside products.

With few rows a step's time is that of reading the weights, and of beginning and ending some nine kernels a layer. Here
a norm is two factors of the product that follows: its weights multiply the product's input, its row factor the result.
Both come from the product before, which adds to the residual: where a long sum is cut among programs, the one that ends
last adds up the parts, in their order. Each kernel begins while the one before it ends, and reads what does not depend
on it meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.kernels.device import described
from dovetail.rollout.native.cuda.kernels.overlap import launch_options, overlaps
from dovetail.rollout.native.cuda.kernels.small_batch_jit import (
    embed_kernel,
    linear_add_kernel,
    norm_gated_kernel,
    norm_qkv_kernel,
)

MAX_ROWS = 64
# A residual times the weights of a norm may be too large a number for float16.
DTYPES = frozenset({torch.bfloat16})
# What all products are multiples of.
_COLUMNS = 32
_DEPTH = 64
# The least that the tensor cores add up at a time.
_MIN_DEPTH = 16
_MAX_STAGES = 6


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
    shares: int = 1
    """Warps that share the depth of a tile, where columns are too few for all."""
    ahead: int = 0
    """So much of the depth is asked for before the kernel before is over."""


# By the most rows: what was fastest of dozens each on an H200 at the 1.5B shape.
_CUTS = {
    "qkv": {
        8: Cut(8, 256, 4, 4, shares=4),
        16: Cut(8, 512, 2, 3),
        32: Cut(8, 256, 2, 6),
        64: Cut(8, 256, 4, 4, shares=4),
    },
    "gated": {
        16: Cut(32, 128, 2, 3, swap=False, ahead=128),
        32: Cut(64, 64, 4, 4, ahead=128),
        64: Cut(64, 64, 4, 4),
    },
    "out": {
        16: Cut(32, 128, 2, 4, 192, ahead=128),
        32: Cut(64, 128, 4, 4, 96, ahead=128),
        64: Cut(64, 128, 4, 4, 48, ahead=128),
    },
    "down": {8: Cut(32, 64, 2, 6, 336), 64: Cut(64, 128, 4, 4, 132)},
}


class Scaled(NamedTuple):
    """The residual on its way into a norm: times the norm's weights, and its squares for the factor of each row."""

    x: torch.Tensor
    squares: torch.Tensor
    """(blocks of columns, rows): sums over as many columns each."""


def runs_on(device: torch.device) -> bool:
    """Whether the tiles fit into a multiprocessor's memory."""
    return device.type != "cuda" or described(device).large_shared_memory


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
    embed_kernel[(rows,)](
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
    norm_qkv_kernel[(tiles,)](
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
        HALF_COLUMNS=cut.columns,
        HEAD=head_size,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        PAGE=page_size,
        BIAS=has_bias,
        **_launch_settings(cut, rows, overlap),
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
    norm_gated_kernel[(num_out // cut.columns,)](
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
        COLUMNS=cut.columns,
        AHEAD=cut.ahead if overlap else 0,
        **_launch_settings(cut, rows, overlap),
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
    linear_add_kernel[(tiles, num_parts)](
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
        COLUMNS=cut.columns,
        AHEAD=cut.ahead if overlap else 0,
        **_launch_settings(cut, rows, overlap),
    )
    return Scaled(out, squares)


def _cut_for(kind: str, rows: int, width: int, num_out: int) -> Cut:
    cut = next(cut for most, cut in _CUTS[kind].items() if rows <= most)
    columns = cut.columns if num_out % cut.columns == 0 else _COLUMNS
    depth = math.gcd(width, cut.depth)
    stages = min(_MAX_STAGES, cut.stages * cut.depth // depth)
    return cut._replace(
        columns=columns,
        depth=depth,
        stages=stages,
        shares=min(cut.shares, depth // _MIN_DEPTH),
        ahead=math.gcd(width, cut.ahead) if cut.ahead else 0,
    )


def _launch_settings(cut: Cut, rows: int, overlap: bool) -> dict[str, int]:
    """Settings that every product kernel takes."""
    return {
        "ROWS": max(8 if cut.swap else 16, triton.next_power_of_2(rows)),
        "DEPTH": cut.depth,
        "SHARES": cut.shares,
        "SWAP": cut.swap,
        "OVERLAP": overlap,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        **launch_options(overlap),
    }
