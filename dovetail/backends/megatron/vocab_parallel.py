"""Log-prob of each label, entropy and the best log-prob, from hidden states and this rank's rows of the head.

The vocabulary is split over tensor-parallel ranks; nothing of its width is ever sent. Sums are in float32. The plain
way keeps one matrix of log-probs for backward and turns it into the gradient in place; with `chunk_size` no more than
a chunk of it is held, and each chunk is computed a second time in backward. Knows nothing of batches or models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.models.head import add_product, float32_logits, gradient_without_labels

NEVER = -1e30
"""Log-prob of the rows that pad the vocabulary: finite, so that 0 times it is 0."""


class VocabShard(NamedTuple):
    """This rank's rows `[first, last)` of the vocabulary, of which those from `num_real` on are padding."""

    group: dist.ProcessGroup
    first: int
    last: int
    num_real: int


def vocab_parallel_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    need_entropy: bool = False,
    need_sum_squares: bool = False,
    chunk_size: int | None = None,
) -> Tensor:
    """`[4, N]` float32: log-probs of the labels, entropies (0 unless asked for), log-probs of the most likely tokens,
    sums of squared probabilities (0 unless asked for).

    `hidden` is `[N, H]`, alike on all ranks of the group, `weight` `[V / tp, H]`. The gradient of `hidden` is this
    rank's part of it: let it pass through a region that adds up over the group. The last two rows have no gradient.
    """
    return _VocabParallelLogProb.apply(
        hidden, weight, labels, shard, float(temperature), need_entropy, need_sum_squares, chunk_size
    )


class _VocabParallelLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabShard,
        temperature: float,
        need_entropy: bool,
        need_sum_squares: bool,
        chunk_size: int | None,
    ) -> Tensor:
        results = hidden.new_zeros(4, hidden.size(0), dtype=torch.float32)
        normalizer = torch.empty_like(results[0])
        kept: Tensor | None = None
        for part in _parts(hidden.size(0), chunk_size):
            log_p = scaled_logits(hidden[part], weight, shard, temperature)
            normalizer[part], best = _normalizer(log_p, shard.group)
            log_p.sub_(normalizer[part].unsqueeze(-1))
            results[0, part] = _at_labels(log_p, labels[part], shard)
            results[2, part] = best - normalizer[part]
            if need_entropy:
                results[1, part] = -_sum_over((log_p.exp() * log_p).sum(-1), shard.group)
            if need_sum_squares:
                results[3, part] = _sum_over((2 * log_p).exp_().sum(-1), shard.group)
            kept = log_p if chunk_size is None else None
        ctx.save_for_backward(hidden, weight, labels, normalizer, results[1].clone(), kept)
        ctx.settings = (shard, temperature, need_entropy, chunk_size)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer, entropy, kept = ctx.saved_tensors
        shard, temperature, need_entropy, chunk_size = ctx.settings
        grad_log_probs, grad_entropy = grads[0][0], grads[0][1] if need_entropy else None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(hidden.size(0), chunk_size):
            if kept is None:
                log_p = scaled_logits(hidden[part], weight, shard, temperature).sub_(normalizer[part].unsqueeze(-1))
            else:
                log_p = kept  # ours alone, and read for the last time: it becomes the gradient
            d_logits = _gradient(
                log_p, labels[part], grad_log_probs[part], None if grad_entropy is None else grad_entropy[part],
                entropy[part], shard,
            ).div_(temperature).to(hidden.dtype)  # fmt: skip
            if grad_hidden is not None:
                grad_hidden[part] = d_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, d_logits, hidden[part])
        grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad, *([None] * 6)


def _parts(num_rows: int, chunk_size: int | None) -> list[slice]:
    if chunk_size is None:
        return [slice(0, num_rows)]
    # At least one part: ranks agree on the number of reductions, and an empty one is cheap.
    return [slice(start, start + chunk_size) for start in range(0, max(1, num_rows), chunk_size)]


def scaled_logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """`[N, V / tp]` float32, never likely on the rows that pad the vocabulary."""
    return hide_padding(float32_logits(hidden, weight).div_(temperature), shard)


def hide_padding(logits: Tensor, shard: VocabShard) -> Tensor:
    """In place."""
    if shard.last > shard.num_real:
        logits[:, max(0, shard.num_real - shard.first) :] = NEVER
    return logits


def _normalizer(logits: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials over the whole vocabulary, and the largest logit."""
    best = logits.amax(-1)
    if group.size() > 1:
        dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    total = _sum_over((logits - best.unsqueeze(-1)).exp_().sum(-1), group)
    return best + total.log(), best


def _at_labels(log_p: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    mine, columns = own_columns(labels, shard)
    return _sum_over(log_p.gather(-1, columns.unsqueeze(-1)).squeeze(-1) * mine, shard.group)


def own_columns(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Which labels are rows of this rank, and their numbers among them."""
    mine = (labels >= shard.first) & (labels < shard.last)
    return mine, (labels - shard.first) * mine


def _gradient(
    log_p: Tensor,
    labels: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    shard: VocabShard,
) -> Tensor:
    """In place of `log_p`, over logits / T."""
    gradient = gradient_without_labels(log_p, entropy, grad_log_probs, grad_entropy)
    mine, columns = own_columns(labels, shard)
    return gradient.scatter_add_(-1, columns.unsqueeze(-1), (grad_log_probs * mine).unsqueeze(-1))


def _sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x
