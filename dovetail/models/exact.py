"""`rollout.exact`: engine and trainer compute a token's log-prob to the same bits, whatever else is in the batch.

Both run the model's own modules with these in the place of its linear layers and norms, and attention that goes through
a sequence's keys in one order. On CUDA the operations are `models.kernels.exact`. On a CPU they take one row after the
other, which is slow and for tests. Gradients are those of the plain operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.models.packing import PackedSegments
from dovetail.models.transfer import to_device

QUERY_BLOCK = 64
"""Tokens of a sequence that a program of `paged_attention` takes, wherever it is used."""

_PAGE = 64  # keys at a time; the engine's pages have as many
_BLOCK = 128  # of the sum over the vocabulary


def use_exact_modules(hf_model: Any) -> None:
    """Replace every linear layer and norm in place, over their own parameters, and mark the attention. Call it before
    FSDP wraps them. A model with other layers is refused."""
    head = hf_model.get_output_embeddings()
    for owner in list(hf_model.modules()):
        if hasattr(owner, "q_proj"):
            owner.attends_exactly = True
        for name, child in owner.named_children():
            if type(child) is nn.Linear:
                setattr(owner, name, ExactLinear(child, torch.float32 if child is head else None))
            elif type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(owner, name, ExactNorm(child))
            elif next(child.parameters(recurse=False), None) is not None and not isinstance(child, nn.Embedding):
                raise ValueError(
                    f"rollout.exact computes linear layers, RMS norms and embeddings; {type(hf_model).__name__} also "
                    f"has {type(child).__name__}. Set rollout.exact=False for it."
                )


class ExactLinear(nn.Linear):
    """In place of `plain`. `dtype` is that of the result; None: as the input."""

    def __init__(self, plain: nn.Linear, dtype: torch.dtype | None) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self._dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        x = input.reshape(-1, self.in_features)
        out = _Linear.apply(x, self.weight, self.bias, self._dtype or input.dtype)
        return out.view(*input.shape[:-1], self.out_features)


class ExactNorm(nn.Module):
    """In place of an RMS norm of transformers."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = plain.weight, plain.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.size(-1))
        eps = self.variance_epsilon
        out = exactly(lambda x, w: _norm(x, w, eps), lambda x, w: _plain_norm(x, w, eps), x, self.weight)
        return out.view_as(hidden_states)


def label_log_probs(logits: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    """float32 log p(label) of each row of logits (rows, vocabulary) over its temperature. No gradient."""
    if _has_kernels(logits):
        from dovetail.models.kernels import exact

        return exact.label_log_probs(logits, labels, temperatures)
    scores = logits.float() / temperatures.unsqueeze(-1)
    scores = scores - scores.amax(-1, keepdim=True)
    # Blocks are added up apart: a sum over more numbers may be split between threads, by how many rows there are.
    padded = F.pad(scores.exp(), (0, -scores.size(-1) % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    log_total = padded.sum(-1).sum(-1, dtype=torch.float64).log()
    return (scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1).double() - log_total).float()


def log_probs_with_gradient(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """`label_log_probs` with one temperature, and the gradient of the plain log-probs."""

    def exact(logits: Tensor) -> Tensor:
        return label_log_probs(logits, labels, logits.new_full((logits.size(0),), temperature, dtype=torch.float32))

    def plain(logits: Tensor) -> Tensor:
        return (logits.float() / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    return exactly(exact, plain, logits)


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside packed sequences, query `[1, heads, N, D]`, the result `[1, N, heads, D]`. A token sees
    the last `window` tokens, itself included."""
    if not _has_kernels(query):
        return _attention_by_token(query, key, value, segments, scale, window)
    from dovetail.models.kernels.paged_attention import prefill_attention

    layout = _paged_layout(segments)
    keys, values = (_as_pages(x[0].transpose(0, 1), segments, layout) for x in (key, value))
    flat = query[0].transpose(0, 1).flatten(1).contiguous()
    out = prefill_attention(
        flat, keys, values, layout.table, layout.blocks, layout.segments, scale, block_size=QUERY_BLOCK, window=window
    )
    return out.unflatten(1, (query.size(1), -1)).unsqueeze(0)


class _PagedLayout(NamedTuple):
    """Packed sequences as `paged_attention` reads them; `targets` is where each key of each sequence goes."""

    num_pages: int
    targets: Tensor
    table: Tensor
    blocks: Tensor
    segments: Tensor


def _paged_layout(segments: PackedSegments) -> _PagedLayout:
    spans = None if segments.shared is None else segments.shared.spans
    befores = tuple(length for _, length in spans) if spans else (0,) * len(segments.lengths)
    return _layout_of(segments.lengths, befores, segments.cu_seqlens.device)


@lru_cache(maxsize=4)  # all layers of a micro-batch ask for the same
def _layout_of(lengths: tuple[int, ...], befores: tuple[int, ...], device: torch.device) -> _PagedLayout:
    num_keys = [length + before for length, before in zip(lengths, befores, strict=True)]
    pages = [-(-count // _PAGE) for count in num_keys]
    first_pages = list(accumulate(pages, initial=0))
    targets = [torch.arange(count) + first * _PAGE for count, first in zip(num_keys, first_pages, strict=False)]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(first_pages, pages, strict=False)):
        table[row, :count] = torch.arange(first, first + count)
    blocks = [(row, first) for row, length in enumerate(lengths) for first in range(0, length, QUERY_BLOCK)]
    starts = list(accumulate(lengths, initial=0))[:-1]
    rows = list(zip(starts, lengths, befores, strict=True))
    tensors = (
        torch.cat(targets),
        table,
        torch.tensor(blocks, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
    )
    return _PagedLayout(first_pages[-1], *to_device(tensors, device))


def _as_pages(tokens: Tensor, segments: PackedSegments, layout: _PagedLayout) -> Tensor:
    """`[N, kv heads, D]` to pages; a beginning that sequences share is copied for each of them."""
    own = tokens if segments.shared is None else tokens[segments.shared.index]
    pages = tokens.new_zeros(layout.num_pages * _PAGE, *tokens.shape[1:])
    pages[layout.targets] = own
    return pages.unflatten(0, (layout.num_pages, _PAGE)).transpose(1, 2).contiguous()


def _attention_by_token(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scale: float, window: int | None
) -> Tensor:
    outs, start = [], 0
    spans = ((0, 0),) * len(segments.lengths) if segments.shared is None else segments.shared.spans
    for length, (first, shared) in zip(segments.lengths, spans, strict=True):
        places = [*range(first, first + shared), *range(start, start + length)]
        keys, values = key[0][:, places], value[0][:, places]
        for token in range(length):
            end = shared + token + 1
            seen = slice(0 if window is None else max(0, end - window), end)
            outs.append(attend_token(query[0][:, start + token], keys[:, seen], values[:, seen], scale))
        start += length
    return torch.stack(outs).unsqueeze(0)


def attend_token(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of one token, query (heads, head size), to keys and values (kv heads, tokens, head size)."""
    grouped = query.unflatten(0, (keys.size(0), -1)).contiguous()
    attended = F.scaled_dot_product_attention(grouped, keys.contiguous(), values.contiguous(), scale=scale)
    return attended.flatten(0, 1)


def exactly(exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What `exact` computes of the inputs, with the gradient of `plain`."""
    return _Exactly.apply(exact, plain, *inputs)


class _Exactly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads[0]))
        return None, None, *(next(found) if want else None for want in wanted)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        if _has_kernels(x):
            from dovetail.models.kernels import exact

            return exact.linear(x, weight, bias, dtype)
        rows = [F.linear(row, weight, bias) for row in x.split(1)]
        return torch.cat(rows).to(dtype) if rows else x.new_empty(0, weight.size(0), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _has_kernels(x):
        return _plain_norm(x, weight, eps)
    from dovetail.models.kernels import exact

    return exact.rms_norm(x, weight, eps)


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    return weight * (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
