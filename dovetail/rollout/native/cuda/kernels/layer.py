"""The small operations between a decoder layer's matrix products, fused. Round where the Hugging Face modules round.

Rounding alike costs nothing here and keeps the engine's log-probs next to those of the trainer's plain forward.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

_ELEMENTS = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalised rows of x (rows, width)."""
    return _rms_norm(x, x, weight, eps, add=False)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` in place, and return its normalised rows."""
    return _rms_norm(x, residual, weight, eps, add=True)


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    targets: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (if given) and rotate `query` (tokens, heads * head size) in place; norm, rotate and store key; store value.

    `targets` says where a token's entries go, as page * page size + offset; -1 stores nothing. `rotation` is cosine and
    sine (tokens, head size) each, or None when the heads are rotated already.
    """
    tokens = query.shape[0]
    _, num_kv, page_size, head_size = keys.shape
    num_heads = query.shape[1] // head_size
    cosine, sine = rotation if rotation is not None else (query, query)
    _rotate_and_store_kernel[(tokens,)](
        query,
        key,
        value,
        keys,
        values,
        targets,
        cosine,
        sine,
        query if query_norm is None else query_norm,
        query if key_norm is None else key_norm,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        eps,
        NUM_HEADS=num_heads,
        HEADS_PADDED=triton.next_power_of_2(num_heads),
        NUM_KV=num_kv,
        KV_PADDED=triton.next_power_of_2(num_kv),
        HEAD=head_size,
        HALF_PADDED=triton.next_power_of_2(head_size // 2),
        PAGE=page_size,
        ROTATE=rotation is not None,
        NORM=query_norm is not None,
        num_warps=4 if num_heads * head_size >= 1024 else 1,
    )


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of two contiguous tensors of one shape, written over `gate`: a third buffer would not fit L2."""
    count = gate.numel()
    _silu_mul_kernel[(triton.cdiv(count, _ELEMENTS),)](gate, up, count, BLOCK=_ELEMENTS, num_warps=4)
    return gate


def _rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, add: bool) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADD=add,
        num_warps=4 if width <= 4096 else 8,
    )
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        x = (x + residual).to(dtype).to(tl.float32)
        tl.store(residual_ptr + row * WIDTH + columns, x.to(dtype), mask=mask)
    variance = tl.sum(x * x, axis=0) / WIDTH
    normed = (x * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (normed * weight).to(dtype), mask=mask)


@triton.jit
def _halves(ptr, base, heads, half, mask, HEAD: tl.constexpr):
    offsets = base + heads[:, None] * HEAD + half[None, :]
    low = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptr + offsets + HEAD // 2, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _normed(low, high, weight_ptr, half, eps, dtype: tl.constexpr, HEAD: tl.constexpr):
    inside = half < HEAD // 2
    variance = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD
    factor = tl.rsqrt(variance + eps)[:, None]
    weight_low = tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
    weight_high = tl.load(weight_ptr + HEAD // 2 + half, mask=inside, other=0.0).to(tl.float32)
    low = ((low * factor).to(dtype).to(tl.float32) * weight_low[None, :]).to(dtype).to(tl.float32)
    high = ((high * factor).to(dtype).to(tl.float32) * weight_high[None, :]).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def _rotated(low, high, cos_low, cos_high, sin_low, sin_high, dtype: tl.constexpr):
    # Each product is rounded before the sum, as the modules do it.
    new_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
    new_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    return new_low, new_high


@triton.jit
def store_entry(ptr, x, mask, dtype: tl.constexpr):
    """Rounded as the modules round, and once more where the pages hold less than the modules' dtype."""
    tl.store(ptr, x.to(dtype).to(tl.float32).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_and_store_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    target_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    query_stride,
    key_stride,
    value_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    NUM_KV: tl.constexpr,
    KV_PADDED: tl.constexpr,
    HEAD: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    half = tl.arange(0, HALF_PADDED)
    inside = half < HEAD // 2
    heads = tl.arange(0, HEADS_PADDED)
    kv_heads = tl.arange(0, KV_PADDED)
    kv_mask = (kv_heads[:, None] < NUM_KV) & inside[None, :]
    key_low, key_high = _halves(key_ptr, token * key_stride, kv_heads, half, kv_mask, HEAD)
    if NORM:
        key_low, key_high = _normed(key_low, key_high, key_norm_ptr, half, eps, dtype, HEAD)
    if ROTATE:
        cos_low = tl.load(cos_ptr + token * HEAD + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos_ptr + token * HEAD + HEAD // 2 + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin_ptr + token * HEAD + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin_ptr + token * HEAD + HEAD // 2 + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        key_low, key_high = _rotated(key_low, key_high, cos_low, cos_high, sin_low, sin_high, dtype)
        head_mask = (heads[:, None] < NUM_HEADS) & inside[None, :]
        low, high = _halves(query_ptr, token * query_stride, heads, half, head_mask, HEAD)
        if NORM:
            low, high = _normed(low, high, query_norm_ptr, half, eps, dtype, HEAD)
        low, high = _rotated(low, high, cos_low, cos_high, sin_low, sin_high, dtype)
        query_offsets = token * query_stride + heads[:, None] * HEAD + half[None, :]
        tl.store(query_ptr + query_offsets, low.to(dtype), mask=head_mask)
        tl.store(query_ptr + query_offsets + HEAD // 2, high.to(dtype), mask=head_mask)

    target = tl.load(target_ptr + token)
    if target >= 0:
        page = (target // PAGE).to(tl.int64)
        offset = target % PAGE
        value_low, value_high = _halves(value_ptr, token * value_stride, kv_heads, half, kv_mask, HEAD)
        out = ((page * NUM_KV + kv_heads[:, None]) * PAGE + offset) * HEAD + half[None, :]
        store_entry(keys_ptr + out, key_low, kv_mask, dtype)
        store_entry(keys_ptr + out + HEAD // 2, key_high, kv_mask, dtype)
        store_entry(values_ptr + out, value_low, kv_mask, dtype)
        store_entry(values_ptr + out + HEAD // 2, value_high, kv_mask, dtype)


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    dtype = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(gate_ptr + offsets, (activated * up).to(dtype), mask=mask)
