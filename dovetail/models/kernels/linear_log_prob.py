"""Triton kernels for one chunk of logits: a forward pass over each row, and a backward pass in place.

The matrix products stay with cuBLAS, which no kernel written here would beat; what these save is memory traffic. The
forward reads the logits once and writes three numbers a row; the backward reads them once and writes their gradient in
the type the next product wants. Refuses nothing: `dovetail.models.head` checks shapes. Needs CUDA.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8


class TritonRows:
    """Same three functions as the PyTorch rows of `dovetail.models.fused_head`."""

    @staticmethod
    def forward(
        logits: Tensor, labels: Tensor, temperature: float, need_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, vocabulary = logits.shape
        # Not one tensor cut in three: Triton would compile once more for each number of rows that aligns otherwise.
        log_probs = torch.empty(rows, device=logits.device, dtype=torch.float32)
        normalizer, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        _forward_kernel[(rows,)](
            logits,
            logits.stride(0),
            labels.contiguous(),
            log_probs,
            normalizer,
            entropy,
            vocabulary,
            1.0 / temperature,
            NEED_ENTROPY=need_entropy,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
        return log_probs, normalizer, entropy if need_entropy else None

    @staticmethod
    def backward(
        logits: Tensor,
        labels: Tensor,
        normalizer: Tensor,
        entropy: Tensor,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        temperature: float,
        dtype: torch.dtype,
    ) -> Tensor:
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        _write_gradient(logits, labels, normalizer, entropy, grad_log_probs, grad_entropy, temperature, out)
        return out

    @staticmethod
    def gradient(logits: Tensor, labels: Tensor, normalizer: Tensor, temperature: float, out: Tensor) -> None:
        ones = torch.ones_like(normalizer)
        _write_gradient(logits, labels, normalizer, normalizer, ones, None, temperature, out)


def _write_gradient(
    logits: Tensor,
    labels: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    out: Tensor,
) -> None:
    rows, vocabulary = logits.shape
    _backward_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        labels.contiguous(),
        normalizer.contiguous(),
        entropy.contiguous(),
        grad_log_probs.contiguous(),
        grad_log_probs.contiguous() if grad_entropy is None else grad_entropy.contiguous(),
        vocabulary,
        1.0 / temperature,
        HAS_ENTROPY=grad_entropy is not None,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def _forward_kernel(
    logits,
    stride,
    labels,
    log_probs,
    normalizer,
    entropy,
    vocabulary,
    inverse_temperature,
    NEED_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    # Online softmax, one running value per lane; lanes are joined once at the end.
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - top) * (z - top): no large numbers to cancel later
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        z = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_top = tl.maximum(top, z)
        # A lane that has seen nothing yet keeps -inf: exp(-inf - -inf) would be nan.
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp(top - safe_top)
        e = tl.exp(z - safe_top)
        if NEED_ENTROPY:
            moved = tl.where(total > 0.0, total * (top - safe_top), 0.0)
            weighted = (weighted + moved) * decay + tl.where(e > 0.0, e * (z - safe_top), 0.0)
        total = total * decay + e
        top = new_top
    row_top = tl.max(top, 0)
    decay = tl.exp(top - row_top)
    row_total = tl.sum(total * decay, 0)
    log_normalizer = row_top + tl.log(row_total)
    label = tl.load(labels + row)
    picked = tl.load(logits + label).to(tl.float32) * inverse_temperature
    tl.store(log_probs + row, picked - log_normalizer)
    tl.store(normalizer + row, log_normalizer)
    if NEED_ENTROPY:
        moved = tl.where(total > 0.0, total * (top - row_top), 0.0)
        tl.store(entropy + row, tl.log(row_total) - tl.sum((weighted + moved) * decay, 0) / row_total)


@triton.jit
def _backward_kernel(
    logits,
    stride,
    out,
    out_stride,
    labels,
    normalizer,
    entropy,
    grad_log_probs,
    grad_entropy,
    vocabulary,
    inverse_temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    log_p = z - tl.load(normalizer + row)
    p = tl.exp(log_p)
    g = tl.load(grad_log_probs + row)
    d = tl.where(column == tl.load(labels + row), g, 0.0) - g * p
    if HAS_ENTROPY:
        # p == 0 only where the logit is -inf or nearly so; its log would make 0 * inf.
        d -= tl.load(grad_entropy + row) * tl.where(p > 0.0, p * (log_p + tl.load(entropy + row)), 0.0)
    tl.store(out + row * out_stride + column, (d * inverse_temperature).to(out.dtype.element_ty), mask=inside)
