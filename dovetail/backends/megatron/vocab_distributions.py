"""What distillation asks of a head split over tensor-parallel ranks: the most likely tokens, log-probs of listed
ones, and the divergence from a teacher over the whole vocabulary.

A second pass of the head over chunks of rows, whose logits are computed again in backward. All ranks of the group pass
the same rows and get the same results; nothing of the width of the vocabulary is sent. As in `vocab_parallel`, the
gradient of `hidden` is this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.algorithms.distillation import vocabulary_divergence
from dovetail.backends.megatron.vocab_parallel import NEVER, VocabShard, hide_padding, own_columns, scaled_logits
from dovetail.models.head import chunk_logits, default_chunk_size, largest, overlap
from dovetail.models.vocabulary_divergence import TENSORS_HELD, OutputLayer, Teacher


@torch.no_grad()
def top_tokens(
    hidden: Tensor, weight: Tensor, shard: VocabShard, top_k: int, vocab_size: int | None, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`[N, k]` ids and float32 log-probs of the most likely tokens below `vocab_size`, whose probabilities add up."""
    shard = _below(shard, vocab_size or shard.num_real)
    ids, log_probs = [], []
    for part in hidden.split(default_chunk_size(weight)):
        own = _log_softmax(scaled_logits(part, weight, shard, temperature), shard)
        values, columns = largest(own, min(top_k, own.size(-1)))
        candidates = _from_all(values, shard.group)
        top = candidates.topk(min(top_k, shard.num_real))
        ids.append(_from_all(columns + shard.first, shard.group).gather(-1, top.indices))
        log_probs.append(top.values)
    return torch.cat(ids), torch.cat(log_probs)


def listed_log_probs(
    hidden: Tensor, weight: Tensor, shard: VocabShard, ids: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`[N, k]` float32 log-probs of the tokens `ids`, and `[N, 1]` the share of them among the k most likely ones."""
    rows, overlaps = default_chunk_size(weight), list[Tensor]()
    num_chunks = len(hidden.split(rows))

    def listed(part: Tensor, wanted: Tensor) -> Tensor:
        mine, columns = own_columns(wanted.long(), shard)
        log_p = _log_softmax(scaled_logits(part, weight, shard, temperature), shard)
        found = reduce_from_tensor_model_parallel_region(log_p.gather(-1, columns) * mine, group=shard.group)
        if len(overlaps) < num_chunks:  # not again in backward
            best, _ = largest(log_p.detach(), min(wanted.size(-1), log_p.size(-1)))
            best = _from_all(best, shard.group).topk(wanted.size(-1)).values
            overlaps.append(overlap(found, best).unsqueeze(-1))
        return found

    log_probs = _in_chunks(listed, hidden, ids, rows)
    return log_probs, torch.cat(overlaps)


def divergence_from(
    hidden: Tensor, weight: Tensor, shard: VocabShard, teacher: Teacher, *, temperature: float
) -> Tensor:
    """`[N, 1]` float32: the divergence at each row, over the tokens that both vocabularies have."""
    assert teacher.hidden is not None, "the batch has the teacher's hidden states"
    shard = _below(shard, teacher.layer.weight.size(0))

    def of_chunk(part: Tensor, teachers: Tensor) -> Tensor:
        log_p = _log_softmax(scaled_logits(part, weight, shard, temperature), shard)
        with torch.no_grad():
            log_q = _log_softmax(_teacher_logits(teachers, teacher.layer, shard, temperature), shard)
        own = vocabulary_divergence(log_p, log_q, teacher.divergence, teacher.log_prob_min)
        return reduce_from_tensor_model_parallel_region(own.unsqueeze(-1), group=shard.group)

    return _in_chunks(of_chunk, hidden, teacher.hidden, max(1, default_chunk_size(weight) // TENSORS_HELD))


def _below(shard: VocabShard, vocab_size: int) -> VocabShard:
    return shard._replace(num_real=min(shard.num_real, vocab_size))


def _in_chunks(call: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, rows: int) -> Tensor:
    pairs = zip(left.split(rows), right.split(rows), strict=True)
    return torch.cat([checkpoint(call, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs])


def _log_softmax(logits: Tensor, shard: VocabShard) -> Tensor:
    """This rank's columns of the log-probs over the whole vocabulary."""
    best = logits.detach().amax(-1, keepdim=True)
    if shard.group.size() > 1:
        dist.all_reduce(best, op=dist.ReduceOp.MAX, group=shard.group)
    own = (logits - best).exp().sum(-1, keepdim=True)
    total = reduce_from_tensor_model_parallel_region(own, group=shard.group)
    # Every rank's log-probs depend on the normalizer: its gradient is the sum over ranks.
    return logits - copy_to_tensor_model_parallel_region(best + total.log(), group=shard.group)


def _teacher_logits(hidden: Tensor, layer: OutputLayer, shard: VocabShard, temperature: float) -> Tensor:
    """Of the same columns; the teacher's layer is whole on every rank."""
    own = slice(shard.first, shard.last)
    bias = None if layer.bias is None else layer.bias[own]
    logits = chunk_logits(hidden, layer.weight[own], bias, softcap=layer.softcap, dtype=layer.weight.dtype)
    missing = shard.last - shard.first - logits.size(-1)
    return hide_padding(F.pad(logits.div(temperature / layer.logit_scale), (0, missing), value=NEVER), shard)


def _from_all(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(columns) for _ in range(group.size())]
    dist.all_gather(parts, columns.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
