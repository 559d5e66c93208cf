"""Log-probability of each label and entropy of each distribution, from hidden states and the head's weight.

Two paths with one result. The plain one holds all logits, `[N, V]`. The fused one goes through the rows in chunks,
forward and backward, and never holds more than one chunk of logits (`dovetail.models.fused_head`). Softmax is in
float32 whatever the weights are. Knows nothing of batches, padding or models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dovetail.models.fused_head import (
    KeepingLogProb,
    Options,
    RecomputingLogProb,
    chunk_rows,
    default_chunk_size,
    gradient_fits,
    logits_with_bias,
    product_dtype,
    triton_is_here,
)
from dovetail.models.fused_head import add_product as add_product
from dovetail.models.fused_head import adds_in_product as adds_in_product
from dovetail.models.fused_head import float32_logits as float32_logits
from dovetail.models.fused_head import gradient_without_labels as gradient_without_labels

_FEW_TOKENS = 1 << 12
_BLOCK = 128


class Float32Head(nn.Linear):
    """In the place of `plain`, a model's output layer: the same parameters, and logits that stay in float32
    (`rollout.fp32_lm_head`). Of bfloat16 the layer itself would round them to 8 bits."""

    def __init__(self, plain: nn.Module) -> None:
        if type(plain) is not nn.Linear:
            raise ValueError(
                f"rollout.fp32_lm_head needs a plain linear output layer, this model has {type(plain).__name__}; set "
                "it to False, or keep the head out of the LoRA targets."
            )
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, input: Tensor) -> Tensor:
        dtype = product_dtype(input)
        with torch.autocast(input.device.type, enabled=False):
            logits = logits_with_bias(input.reshape(-1, self.in_features).to(dtype), self.weight.to(dtype), self.bias)
        return logits.view(*input.shape[:-1], self.out_features)


def use_float32_head(hf_model: Any) -> None:
    """Give the model a `Float32Head`. Call it before FSDP wraps the model."""
    hf_model.set_output_embeddings(Float32Head(hf_model.get_output_embeddings()))


def log_softmax(scores: Tensor) -> Tensor:
    """Over the last dimension. PyTorch's own adds up in float32 one by one on a CPU: 2e-4 off at 152 k tokens."""
    if scores.is_cuda or scores.size(-1) <= _FEW_TOKENS:
        return scores.log_softmax(-1)
    return scores - scores.logsumexp(-1, keepdim=True)


class TopTokens(NamedTuple):
    """The k most likely labels of each row: `[N, k]` ids, and float32 log-probs."""

    ids: Tensor
    log_probs: Tensor


class TokenLists(NamedTuple):
    """What is wanted beside the label of each row: its `top_k` most likely labels, and log p of given ones."""

    top_k: int = 0
    vocab_size: int | None = None
    """Of `top_k`: only labels below it, whose probabilities then add up to 1. None: all."""
    ids: Tensor | None = None
    """`[N, k]`: labels whose log-probs are wanted."""


class ListedLabels(NamedTuple):
    """What `TokenLists` asks for."""

    top: TopTokens | None
    listed: Tensor | None
    overlap: Tensor | None


class LogProbs(NamedTuple):
    log_probs: Tensor
    """`[N]` float32: log p(label)."""
    entropy: Tensor | None
    """`[N]` float32, `None` when it was not asked for."""
    best: Tensor | None = None
    """`[N]` float32: log p of the most likely label, `None` when it was not asked for."""
    sum_squares: Tensor | None = None
    """`[N]` float32: sum of p^2 over all labels, without a gradient; `None` when it was not asked for."""
    top: TopTokens | None = None
    """The most likely labels, without a gradient; `None` when they were not asked for."""
    listed: Tensor | None = None
    """`[N, k]` float32: log p of the `k` labels listed for each row; `None` when none were."""
    overlap: Tensor | None = None
    """`[N]` float32: share of the listed labels that are among the `k` most likely ones; `None` like `listed`."""


class EntropyMemory(NamedTuple):
    """How the plain head saves memory on the entropy, which needs two more tensors of the size of the logits."""

    chunk_size: int | None = None
    """Rows at a time: only so many are held beside the log-probs, but all are kept for backward. None: all rows."""
    recompute: bool = False
    """Compute it a second time in backward, so that nothing is kept."""


def plain_log_prob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    need_entropy: bool = True,
    need_best: bool = False,
    need_sum_squares: bool = False,
    entropy_memory: EntropyMemory = EntropyMemory(),  # noqa: B008 - immutable
) -> LogProbs:
    """From full logits `[..., V]`."""
    scaled = logits.float() / temperature
    log_p = log_softmax(scaled)
    log_probs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = _entropy_in_parts(log_p, entropy_memory) if need_entropy else None
    best = log_p.amax(-1) if need_best else None
    return LogProbs(log_probs, entropy, best, _sum_squares(log_p) if need_sum_squares else None)


@torch.no_grad()
def _sum_squares(log_p: Tensor) -> Tensor:
    rows = chunk_rows(log_p.size(-1), log_p.device)
    return torch.cat([(2 * part).exp_().sum(-1) for part in log_p.split(rows)])


def _entropy_in_parts(log_p: Tensor, memory: EntropyMemory) -> Tensor:
    parts = (log_p,) if memory.chunk_size is None else log_p.split(memory.chunk_size)
    if memory.recompute and torch.is_grad_enabled():
        entropies = [checkpoint(_entropy, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    else:
        entropies = [_entropy(part) for part in parts]
    return entropies[0] if len(entropies) == 1 else torch.cat(entropies)


def _entropy(log_p: Tensor) -> Tensor:
    # Not logsumexp - mean logit: that difference of large numbers loses digits when the entropy is small.
    return -(log_p.exp() * log_p).sum(-1)


def chunk_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
    size: int | None = None,
) -> Tensor:
    """`[C, V]` float32 of a few rows, with products in `dtype`; of the first `size` labels alone, if it is given."""
    return log_softmax(chunk_logits(hidden, weight, bias, softcap=softcap, dtype=dtype)[:, :size].div(temperature))


def chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, softcap: float | None, dtype: torch.dtype
) -> Tensor:
    """`[C, V]` float32 of a few rows, with products in `dtype`."""
    logits = logits_with_bias(hidden.to(dtype), weight.to(dtype), bias)
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def listed_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lists: TokenLists,
    *,
    temperature: float,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> ListedLabels:
    """The most likely labels and the log-probs of listed ones, by a second pass of the head over chunks of rows.

    Logits of a chunk are computed again in backward, so that no more than one chunk of them is held.
    """
    overlaps: list[Tensor] = []

    def log_p(part: Tensor, size: int | None = None) -> Tensor:
        return chunk_log_probs(part, weight, bias, temperature=temperature, softcap=softcap, dtype=dtype, size=size)

    def listed(part: Tensor, ids: Tensor) -> Tensor:
        of_all = log_p(part)
        own = of_all.gather(-1, ids)
        if len(overlaps) < len(chunks):  # not again in backward
            overlaps.append(overlap(own, largest(of_all.detach(), ids.size(-1))[0]))
        return own

    dtype = product_dtype(hidden)
    chunks = hidden.split(chunk_size or default_chunk_size(weight))
    top, of_ids = None, None
    with torch.autocast(hidden.device.type, enabled=False):
        if lists.top_k:
            size = min(lists.vocab_size or weight.size(0), weight.size(0))
            with torch.no_grad():
                parts = [largest(log_p(part, size), min(lists.top_k, size)) for part in chunks]
            top = TopTokens(torch.cat([ids for _, ids in parts]), torch.cat([values for values, _ in parts]))
        if lists.ids is not None:
            pairs = zip(chunks, lists.ids.split([len(part) for part in chunks]), strict=True)
            of_ids = torch.cat(
                [checkpoint(listed, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
            )
    return ListedLabels(top, of_ids, torch.cat(overlaps) if overlaps else None)


def kept_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    kept: Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> LogProbs:
    """Of softmax over the labels `kept` for each row alone, `[N, k]` with -1 after the last.

    A row that lists none has its own label alone, with log-prob 0. Logits of a chunk are computed again in backward.
    Entropy, the best label and the sum of squares are of `k` numbers a row, so they are always there.
    """

    def of_chunk(part: Tensor, labels: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        logits = chunk_logits(part, weight, bias, softcap=softcap, dtype=dtype)
        kept = torch.cat([torch.where(kept[:, :1] < 0, labels.unsqueeze(-1), kept[:, :1]), kept[:, 1:]], dim=-1)
        inside = kept >= 0
        scores = logits.gather(-1, kept.clamp(min=0)).div(temperature).masked_fill(~inside, -torch.inf)
        normalizer = scores.logsumexp(-1)
        log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).div(temperature) - normalizer
        # 0 and not -inf where nothing is: its product with a probability of 0 is no number.
        log_p = (scores - normalizer.unsqueeze(-1)).masked_fill(~inside, 0.0)
        p = log_p.exp() * inside
        return log_probs, -(p * log_p).sum(-1), (scores.amax(-1) - normalizer), p.detach().square().sum(-1)

    dtype = product_dtype(hidden)
    rows = chunk_size or default_chunk_size(weight)
    with torch.autocast(hidden.device.type, enabled=False):
        chunks = zip(hidden.split(rows), labels.split(rows), kept.split(rows), strict=True)
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    log_probs, entropy, best, squares = map(torch.cat, zip(*parts, strict=True))
    return LogProbs(log_probs, entropy, best, squares)


@torch.no_grad()
def overlap(listed: Tensor, most_likely: Tensor) -> Tensor:
    """`[N]`: the share of `listed` log-probs that are among the `most_likely`, of which both are `[N, k]`."""
    return (listed >= most_likely.amin(-1, keepdim=True)).float().mean(-1)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of `scores.topk(k)`, for `[N, V]`: 1 GiB with k=64 takes 1.2 ms instead of 3.0 on an H200.

    The k largest are in the k blocks with the largest maxima, so most of `scores` is read once.
    """
    size, count = scores.size(-1), scores.size(-1) // _BLOCK
    if 4 * k * _BLOCK > size:
        return scores.topk(k)
    blocks, tail = scores[:, : count * _BLOCK].unflatten(-1, (count, _BLOCK)), scores[:, count * _BLOCK :]
    best = blocks.amax(-1).topk(k, sorted=False).indices.unsqueeze(-1)
    values, at = torch.cat([blocks.gather(1, best.expand(-1, -1, _BLOCK)).flatten(1), tail], 1).topk(k)
    places = torch.arange(size, device=scores.device)
    ids = torch.cat([(best * _BLOCK + places[:_BLOCK]).flatten(1), places[count * _BLOCK :].expand(len(scores), -1)], 1)
    return values, ids.gather(1, at)


def fused_linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    need_entropy: bool = False,
    chunk_size: int | None = None,
    bias: Tensor | None = None,
    use_triton: bool | None = None,
    need_sum_squares: bool = False,
    keep_gradient: bool | None = None,
) -> LogProbs:
    """The same from `hidden [N, H]` and `weight [V, H]`, chunk by chunk. Gradients go to hidden, weight and bias.

    `chunk_size` counts rows; by default a chunk of logits takes 128 MiB on CPU and 1 GiB on CUDA. Matrix products run
    in the autocast type, or in the type of `hidden`; sums over the vocabulary and the weight's gradient over chunks are
    accumulated in float32. `use_triton` is `None` for "on CUDA, if Triton is there". `keep_gradient` holds `[N, V]` in
    the type of the products from forward to backward, in the place of a second product; never with entropy. `None`:
    with Triton, where it fits (`gradient_fits`).
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(f"hidden must be [N, H] and labels [N]; got {tuple(hidden.shape)} and {tuple(labels.shape)}.")
    if chunk_size is None:
        chunk_size = default_chunk_size(weight)
    if use_triton is None:
        use_triton = hidden.is_cuda and triton_is_here()
    options, keeps = Options(float(temperature), int(chunk_size), use_triton), keep_gradient
    if need_entropy or not torch.is_grad_enabled():
        keeps = False
    elif keeps is None:
        keeps = use_triton and gradient_fits(hidden, weight, chunk_size)
    if keeps:
        log_probs, entropy = KeepingLogProb.apply(hidden, weight, bias, labels, options), None
    else:
        log_probs, entropy = RecomputingLogProb.apply(hidden, weight, bias, labels, need_entropy, options)
    squares = None
    if need_sum_squares:
        squares = _sum_squares_in_chunks(hidden, weight, bias, float(temperature), int(chunk_size))
    return LogProbs(log_probs, entropy if need_entropy else None, sum_squares=squares)


@torch.no_grad()
def _sum_squares_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, chunk_size: int
) -> Tensor:
    """A second pass of the head: it is asked for by few, and only without gradients."""
    dtype = product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.to(dtype)
        parts = [
            _sum_squares(log_softmax(logits_with_bias(part.to(dtype), matrix, bias).div_(temperature)))
            for part in hidden.split(chunk_size)
        ]
    return torch.cat(parts)
