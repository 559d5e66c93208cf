"""What the Triton kernels compute, in plain PyTorch: the definition they are tested against, and pages on a CPU.

Slow on purpose: one sequence at a time where that reads best.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dovetail.rollout.native.cuda.pages import as_bytes
from dovetail.rollout.native.cuda.slots import SlotState
from dovetail.rollout.native.noise import fold
from dovetail.rollout.native.sampler import filter_weights, race_blocks

small_batch = None  # those kernels change no result, so there is nothing to define here


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    *,
    num_splits: int = 1,
    window: int | None = None,
) -> torch.Tensor:
    del num_splits  # a way to compute, not what is computed
    num_kv, head_size = keys.shape[1], keys.shape[3]
    out = torch.zeros_like(query)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length:
            heads = query[row].view(num_kv, -1, head_size)
            first = 0 if window is None else max(0, length - window)
            key, value = (_gathered(side, table[slot], length, query.dtype)[:, first:] for side in (keys, values))
            out[row] = F.scaled_dot_product_attention(heads, key, value, scale=scaling).flatten()
    return out


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    blocks: torch.Tensor,
    segments: torch.Tensor,
    scaling: float,
    *,
    block_size: int,
    heads_together: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    del blocks, block_size, heads_together
    num_kv, head_size = keys.shape[1], keys.shape[3]
    out = torch.empty_like(query)
    for row, (start, count, before) in enumerate(segments.tolist()):
        heads = query[start : start + count].view(count, num_kv, -1, head_size).permute(1, 2, 0, 3)
        key, value = (_gathered(side, table[row], before + count, query.dtype)[:, None] for side in (keys, values))
        queries = torch.arange(before, before + count, device=query.device)
        distance = queries[:, None] - torch.arange(before + count, device=query.device)
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        size = (-1, heads.shape[1], -1, -1)
        attended = F.scaled_dot_product_attention(
            heads, key.expand(size), value.expand(size), attn_mask=mask, scale=scaling
        )
        out[start : start + count] = attended.permute(2, 0, 1, 3).flatten(1)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    full = x.float()
    return weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


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
    _, num_kv, page_size, head_size = keys.shape
    key_heads = key.view(-1, num_kv, head_size)
    if rotation is not None:
        query_heads = query.view(-1, query.shape[1] // head_size, head_size)
        query_heads.copy_(_rotated(_head_norm(query_heads, query_norm, eps), rotation))
        key_heads = _rotated(_head_norm(key_heads, key_norm, eps), rotation)
    chosen = targets >= 0
    pages, offsets = targets[chosen] // page_size, targets[chosen] % page_size
    for side, new in ((keys, key_heads), (values, value.view(-1, num_kv, head_size))):
        as_bytes(side)[pages, :, offsets] = as_bytes(new[chosen].to(side.dtype))


def project_qkv(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return query, key, value


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def linear_add_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    return add_rms_norm(F.linear(x, weight), residual, norm, eps)


def draw(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    state: SlotState,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    filtered: bool = False,
) -> None:
    index = slots.long()
    scores = logits.float() / state.temperatures[index].unsqueeze(-1)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp()
    left = weights
    if filtered:
        top_k, top_p, min_p, processed = (by_slot[index] for by_slot in state.filters)
        limited = top_k[top_k < logits.shape[1]]
        left = filter_weights(weights, top_k.long(), top_p, min_p, int(limited.max()) if len(limited) else 0)
        scores = torch.where((processed != 0).unsqueeze(-1) & (left == 0), float("-inf"), scores)
    raced = race_blocks(left, fold(state.keys[index], positions + 1))
    tokens.copy_(torch.where(state.greedy[index] != 0, scores.argmax(dim=-1), raced))
    log_probs.copy_(scores.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1))


def begin_rows(
    slots: torch.Tensor, state: SlotState, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    index = slots.long()
    positions, is_active = state.cached[index].long(), state.active[index] != 0
    last = state.table.shape[1] * page_size - 1
    pages = state.table[index, positions.clamp(max=last) // page_size].long()
    lengths = torch.where(is_active, positions + 1, 0).int()
    targets = torch.where(is_active, pages * page_size + positions % page_size, -1)
    return state.last_tokens[index], positions, lengths, targets


def end_rows(
    slots: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    state: SlotState,
    step: torch.Tensor,
    out_tokens: torch.Tensor,
    out_log_probs: torch.Tensor,
) -> None:
    index, rows = slots.long(), slots.shape[0]
    is_active = state.active[index] != 0
    stopped = (tokens.unsqueeze(-1) == state.stop_ids[index]).any(dim=-1)
    done = stopped | (state.cached[index] + 2 >= state.max_lengths[index])
    out_tokens[int(step), :rows] = torch.where(is_active, torch.where(done, -2 - tokens, tokens), -1)
    out_log_probs[int(step), :rows] = log_probs
    moving = index[is_active]
    state.last_tokens[moving] = tokens[is_active]
    state.cached[moving] += 1
    state.active[moving] = (~done[is_active]).int()


def _gathered(pool: torch.Tensor, pages: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """(kv heads, length, head size) of the sequence on these pages."""
    used = pages[: -(-length // pool.shape[2])].long()
    return as_bytes(pool)[used].view(pool.dtype).to(dtype).transpose(0, 1).flatten(1, 2)[:, :length]


def _head_norm(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return heads if weight is None else rms_norm(heads, weight, eps)


def _rotated(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = (part.unsqueeze(1) for part in rotation)
    low, high = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-high, low), dim=-1) * sine
