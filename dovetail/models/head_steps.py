"""Steps of a head that goes through rows in chunks, forward and backward. Knows nothing of how its weights are split.

Logits and what is added up over chunks are float32, whatever the weights are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}


def default_chunk_size(weight: Tensor) -> int:
    """Rows whose float32 logits take 1 GiB on CUDA and 128 MiB on a CPU."""
    return chunk_rows(weight.size(0), weight.device)


def chunk_rows(num_tokens: int, device: torch.device) -> int:
    """The same for a vocabulary of `num_tokens`."""
    return max(1, _CHUNK_BYTES.get(device.type, 1 << 27) // (4 * num_tokens))


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden @ weight.T` in float32; the product itself runs in the type of the two."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # no rounding of the logits to 8 bits
    return F.linear(hidden, weight).float()


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
    elif d_logits.is_cuda:
        total.add_(torch.mm(d_logits.t(), hidden, out_dtype=torch.float32))
    else:
        total.add_(d_logits.t() @ hidden)
