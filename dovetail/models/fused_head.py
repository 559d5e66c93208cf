"""Log-probs of labels from hidden states and the head's weight, in chunks of rows: products, kernels, gradients.

The logits of a chunk are computed a second time in backward, or their gradient is kept from the forward pass. Sums over
the vocabulary are in float32 whatever the weights are. `dovetail.models.head` says which of the two, and checks shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
# Triton compiles a kernel once more for pointers that are no multiple of 16 bytes. A chunk's part of a column of
# numbers or labels begins at one after a multiple of 16 rows. It costs at most 15 of the 1,766 rows of 152 k tokens.
_ROWS_MULTIPLE = 16


class Options(NamedTuple):
    temperature: float
    chunk_size: int
    """In rows."""
    use_triton: bool


def default_chunk_size(weight: Tensor) -> int:
    """Rows whose float32 logits take 1 GiB on CUDA and 128 MiB on a CPU."""
    return chunk_rows(weight.size(0), weight.device)


def chunk_rows(num_tokens: int, device: torch.device) -> int:
    """The same for a vocabulary of `num_tokens`."""
    rows = _CHUNK_BYTES.get(device.type, 1 << 27) // (4 * num_tokens)
    return max(1, rows - rows % _ROWS_MULTIPLE if rows > _ROWS_MULTIPLE else rows)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """What products with `hidden` are computed in: the autocast type, or its own."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden @ weight.T` in float32. The product runs in the type of the two, its sums in float32."""
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return _Float32Product.apply(hidden, weight)
    return F.linear(hidden, weight).float()


def logits_with_bias(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = float32_logits(hidden, weight)
    return logits if bias is None else logits.add_(bias)


class _Float32Product(torch.autograd.Function):
    """PyTorch's product of two bfloat16 matrices that is not rounded to 8 bits has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        gradient, (needs_hidden, needs_weight) = grads[0].to(hidden.dtype), ctx.needs_input_grad
        return gradient @ weight if needs_hidden else None, gradient.t() @ hidden if needs_weight else None


def triton_is_here() -> bool:
    return find_spec("triton") is not None


def gradient_fits(hidden: Tensor, weight: Tensor, chunk_size: int) -> bool:
    """Whether keeping the gradient over the logits takes at most half of the memory that is free on the device now.

    A chunk of logits beside it, or the weight's gradient, is counted with it. The other half is for what no formula
    knows: fragments, libraries, the next layers' weights. Deterministic runs must not depend on free memory: never.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    kept = product_dtype(hidden).itemsize * len(hidden) * len(weight)
    chunk = 4 * min(len(hidden), chunk_size) * len(weight)
    return 2 * (kept + max(chunk, 4 * weight.numel())) <= _free_bytes(hidden.device)


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    reused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reused


class RecomputingLogProb(torch.autograd.Function):
    """Log-probs, and entropy or zeros. The logits of a chunk are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        need_entropy: bool,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        dtype, rows = product_dtype(hidden), _rows(options)
        log_probs = hidden.new_empty(hidden.size(0), dtype=torch.float32)
        normalizer, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            for part in _parts(hidden, options):
                logits = logits_with_bias(hidden[part].to(dtype), matrix, bias)
                log_probs[part], normalizer[part], chunk_entropy = rows.forward(
                    logits, labels[part], options.temperature, need_entropy
                )
                if chunk_entropy is not None:
                    entropy[part] = chunk_entropy
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, entropy)
        ctx.settings = (need_entropy, dtype, options)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizer, entropy = ctx.saved_tensors
        need_entropy, dtype, options = ctx.settings
        rows = _rows(options)
        grad_log_probs, grad_entropy = grads[0].float(), grads[1].float() if need_entropy else None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            for part in _parts(hidden, options):
                h = hidden[part].to(dtype)
                d_logits = rows.backward(
                    logits_with_bias(h, matrix, bias),
                    labels[part],
                    normalizer[part],
                    entropy[part],
                    grad_log_probs[part],
                    grad_entropy[part] if grad_entropy is not None else None,
                    options.temperature,
                    dtype,
                )
                if grad_hidden is not None:
                    grad_hidden[part] = d_logits @ matrix
                if grad_weight is not None:
                    add_product(grad_weight, d_logits, h)
                if grad_bias is not None:
                    grad_bias += d_logits.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *([None] * 3),
        )


class KeepingLogProb(torch.autograd.Function):
    """Log-probs alone. The gradient over a row's logits is that of its log-prob times one number, which comes last: the
    first is kept, `[N, V]` in the type of the products, and the products take the second as a factor of their rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options
    ) -> Tensor:
        dtype, rows = product_dtype(hidden), _rows(options)
        log_probs = hidden.new_empty(hidden.size(0), dtype=torch.float32)
        d_logits = hidden.new_empty(hidden.size(0), weight.size(0), dtype=dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            for part in _parts(hidden, options):
                logits = logits_with_bias(hidden[part].to(dtype), matrix, bias)
                log_probs[part], normalizer, _ = rows.forward(logits, labels[part], options.temperature, False)
                rows.gradient(logits, labels[part], normalizer, options.temperature, d_logits[part])
        ctx.save_for_backward(hidden, weight, bias, d_logits)
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, d_logits = ctx.saved_tensors
        factor, dtype = grads[0].float().unsqueeze(-1), d_logits.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = grad_weight = grad_bias = None
        with torch.autocast(hidden.device.type, enabled=False):
            if needs_hidden:
                grad_hidden = (float32_logits(d_logits, weight.to(dtype).t()) * factor).to(hidden.dtype)
            if needs_weight:
                rows = (hidden.float() * factor).to(dtype)
                grad_weight = float32_logits(d_logits.t(), rows.t()).to(weight.dtype)
            if needs_bias:
                grad_bias = (d_logits.t() @ factor.to(dtype)).squeeze(-1).to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _parts(hidden: Tensor, options: Options) -> Iterator[slice]:
    return (slice(start, start + options.chunk_size) for start in range(0, hidden.size(0), options.chunk_size))


def _rows(options: Options) -> Any:
    if not options.use_triton:
        return _TorchRows
    from dovetail.models.kernels.linear_log_prob import TritonRows

    return TritonRows


class _TorchRows:
    """What happens to one chunk of float32 logits `[C, V]`. The Triton sibling has the same three functions."""

    @staticmethod
    def forward(
        logits: Tensor, labels: Tensor, temperature: float, need_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits.div_(temperature)
        normalizer = logits.logsumexp(-1)
        log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normalizer
        if not need_entropy:
            return log_probs, normalizer, None
        log_p = logits.sub_(normalizer.unsqueeze(-1))
        # Not a dot product: BLAS adds the whole vocabulary up in one float32, wrong in the fourth digit.
        return log_probs, normalizer, -log_p.exp().mul_(log_p).sum(-1)

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
        log_p = logits.div_(temperature).sub_(normalizer.unsqueeze(-1))
        d_logits = gradient_without_labels(log_p, entropy, grad_log_probs, grad_entropy)
        d_logits.scatter_add_(-1, labels.unsqueeze(-1), grad_log_probs.unsqueeze(-1))
        return d_logits.div_(temperature).to(dtype)

    @staticmethod
    def gradient(logits: Tensor, labels: Tensor, normalizer: Tensor, temperature: float, out: Tensor) -> None:
        """That of the log-probs, into `out`, from the logits as `forward` leaves them."""
        d_logits = logits.sub_(normalizer.unsqueeze(-1)).exp_().neg_()
        out.copy_(d_logits.scatter_add_(-1, labels.unsqueeze(-1), torch.ones_like(d_logits[:, :1])).div_(temperature))


def gradient_without_labels(
    log_p: Tensor, entropy: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient of log-probs and entropy over z = logits / T, in place of `log_p`; the caller adds the labels' part.

    With p = softmax(z): d log p_y = onehot - p and d H = -p (log p + H). The onehot is what is missing here.
    """
    if grad_entropy is None:
        return log_p.exp_().mul_(-grad_log_probs.unsqueeze(-1))
    p = log_p.exp()
    gradient = log_p.add_(entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
    return gradient.sub_(grad_log_probs.unsqueeze(-1)).mul_(p)


def add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """`total += d_logits.T @ hidden`, kept in float32."""
    if d_logits.dtype == torch.float32:
        total.addmm_(d_logits.t(), hidden)
    elif adds_in_product(d_logits.device, d_logits.dtype):
        torch.addmm(total, d_logits.t(), hidden, out_dtype=torch.float32, out=total)
    elif d_logits.is_cuda:
        total.add_(torch.mm(d_logits.t(), hidden, out_dtype=torch.float32))
    else:
        total.add_(d_logits.t() @ hidden)


@functools.cache
def adds_in_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch adds a product of `dtype` to a float32 matrix in one call, which saves writing and reading
    the product. CUDA only, in releases with https://github.com/pytorch/pytorch/pull/167931. Tried on a small one."""
    if device.type != "cuda":
        return False
    total = torch.arange(128, dtype=torch.float32, device=device).view(16, 8) + 0.25
    left = (torch.arange(512, device=device) % 3).view(32, 16).to(dtype)
    right = (torch.arange(256, device=device) % 5).view(32, 8).to(dtype)
    expected = total + torch.mm(left.t(), right, out_dtype=torch.float32)  # small integers and quarters: exact
    try:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return total.equal(expected)
