"""Attention over the slot cache, plugged into Hugging Face models through `AttentionInterface`. Causal, full or with a
sliding window; the cache keeps what has left the window.

The models run on one packed row of tokens (1, T). Which sequence a token belongs to is known only here: a step object
travels to each layer as the keyword `kv_step`, writes the layer's new keys and values and attends over the cache.
No mask function is registered under our name, so the models build no mask of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from dovetail.models.exact import attend_token
from dovetail.rollout.native.kv_cache import SlotKVCache

ATTENTION_NAME = "dovetail_native_rollout"

# One SDPA call costs about as much as attending to this many more tokens (CPU, 9 heads of 64: 9 us against 0.18 us).
_CPU_CALL_TOKENS = 48


class KVStep(Protocol):
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attention output (1, T, heads * head size) for query (1, heads, T, head size), key and value alike. A token
        sees the last `window` tokens, itself included."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, start + length) of the sequence in `slot`; what lies before `start` is in the cache."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def cut(self, length: int) -> list[Segment]:
        """The same tokens in segments of at most `length`."""
        starts = range(self.start, self.end, length)
        return [Segment(self.slot, start, min(length, self.end - start)) for start in starts]


class PrefillStep:
    """Ragged prefill: one SDPA call per segment, no padding between them.

    With a window a segment is cut as prefill in chunks cuts it, so that a call reads less than two windows of keys.
    """

    def __init__(self, cache: SlotKVCache, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        self.segments = segments
        self.device = device
        self._masked: dict[int | None, list[tuple[Segment, int, torch.Tensor | None]]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        cached_keys, cached_values = self.cache.layer(layer, key, value)
        num_heads, num_kv = query.shape[1], key.shape[1]
        outputs = []
        offset = 0
        for segment, first, mask in self._segments_of(window):
            tokens = slice(offset, offset + segment.length)
            offset += segment.length
            slot_keys, slot_values = cached_keys[segment.slot], cached_values[segment.slot]
            slot_keys[:, segment.start : segment.end] = key[0, :, tokens]
            slot_values[:, segment.start : segment.end] = value[0, :, tokens]
            # Query heads that share a key head become the head axis, key heads the batch axis; the key is expanded by
            # stride, never repeated in memory.
            grouped = query[0, :, tokens].unflatten(0, (num_kv, num_heads // num_kv))
            attended = F.scaled_dot_product_attention(
                grouped,
                slot_keys[:, None, first : segment.end].expand(-1, grouped.shape[1], -1, -1),
                slot_values[:, None, first : segment.end].expand(-1, grouped.shape[1], -1, -1),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
            outputs.append(attended.flatten(0, 1).transpose(0, 1).reshape(segment.length, -1))
        return torch.cat(outputs).unsqueeze(0)

    def _segments_of(self, window: int | None) -> list[tuple[Segment, int, torch.Tensor | None]]:
        """Segments, the first key that one of its tokens sees, and a mask where plain causal attention is not right."""
        if window not in self._masked:
            cut = self.segments if window is None else [part for whole in self.segments for part in whole.cut(window)]
            firsts = [0 if window is None else max(0, segment.start + 1 - window) for segment in cut]
            self._masked[window] = [
                (segment, first, _continuation_mask(segment, first, window, self.device) if segment.start else None)
                for segment, first in zip(cut, firsts, strict=True)
            ]
        return self._masked[window]


class ExactStep:
    """Segments of prompts or new tokens, one token after the other, as `models.exact` attends in the trainer."""

    def __init__(self, cache: SlotKVCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        self.segments = segments

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        cached_keys, cached_values = self.cache.layer(layer, key, value)
        outputs: list[torch.Tensor] = []
        for segment in self.segments:
            keys, values = cached_keys[segment.slot], cached_values[segment.slot]
            for position in range(segment.start, segment.end):
                token = len(outputs)
                keys[:, position], values[:, position] = key[0, :, token], value[0, :, token]
                seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
                outputs.append(attend_token(query[0, :, token], keys[:, seen], values[:, seen], scaling).flatten())
        return torch.stack(outputs).unsqueeze(0)


class DecodeStep:
    """One new token for each of the slots 0..R-1.

    Heads that share a key head are folded into the query length. Neighbouring slots of similar length go through one
    SDPA call, padded to the longest of them; `spans` are those neighbourhoods.
    """

    def __init__(
        self, cache: SlotKVCache, positions: torch.Tensor, lengths: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> None:
        self.cache = cache
        self.positions = positions
        self.spans = [(first, last, min(lengths[first:last]), max(lengths[first:last])) for first, last in spans]
        self._masked: dict[int | None, list[tuple[slice, slice, torch.Tensor | None]]] = {}
        self._targets: dict[int, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        cached_keys, cached_values = self.cache.layer(layer, key, value)
        num_rows, num_kv = key.shape[2], key.shape[1]
        targets = self._write_targets(num_kv)
        _flat(cached_keys).index_copy_(0, targets, key[0].transpose(0, 1).reshape(num_rows * num_kv, -1))
        _flat(cached_values).index_copy_(0, targets, value[0].transpose(0, 1).reshape(num_rows * num_kv, -1))
        folded = query[0].transpose(0, 1).unflatten(1, (num_kv, query.shape[1] // num_kv))
        outputs = [
            F.scaled_dot_product_attention(
                folded[rows], cached_keys[rows, :, seen], cached_values[rows, :, seen], attn_mask=mask, scale=scaling
            )
            for rows, seen, mask in self._spans_of(window, query.dtype)
        ]
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended.reshape(1, num_rows, -1)

    def _write_targets(self, num_kv: int) -> torch.Tensor:
        """Where the new entries go in a layer seen as (slots * kv heads * capacity, head size); same for all layers."""
        if num_kv not in self._targets:
            rows = torch.arange(self.positions.shape[0], device=self.positions.device).unsqueeze(-1)
            heads = torch.arange(num_kv, device=self.positions.device)
            flat = (rows * num_kv + heads) * self.cache.capacity + self.positions.unsqueeze(-1)
            self._targets[num_kv] = flat.flatten()
        return self._targets[num_kv]

    def _spans_of(self, window: int | None, dtype: torch.dtype) -> list[tuple[slice, slice, torch.Tensor | None]]:
        """Rows, the keys that one of them sees, and a mask where another does not see all of these."""
        if window not in self._masked:
            bias = self._bias(window, dtype) if any(short != long for *_, short, long in self.spans) else None
            self._masked[window] = spans = []
            for first, last, shortest, longest in self.spans:
                seen = slice(0 if window is None else max(0, shortest - window), longest)
                mask = None if bias is None or shortest == longest else bias[first:last, None, None, seen]
                spans.append((slice(first, last), seen, mask))
        return self._masked[window]

    def _bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(rows, keys). Additive, in the dtype of the query: SDPA on CPU is slower with a boolean mask."""
        keys = torch.arange(max(longest for *_, longest in self.spans), device=self.positions.device)
        hidden = keys > self.positions.unsqueeze(-1)
        if window is not None:
            hidden |= keys <= self.positions.unsqueeze(-1) - window
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def plan_spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut slots 0..R-1 into neighbourhoods so that padding costs less than the calls it saves."""
    spans = []
    first, longest = 0, lengths[0]
    for row in range(1, len(lengths)):
        length = lengths[row]
        padding = max(longest - length, (length - longest) * (row - first))
        if padding > _CPU_CALL_TOKENS:
            spans.append((first, row))
            first, longest = row, length
        else:
            longest = max(longest, length)
    spans.append((first, len(lengths)))
    return spans


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kv_step: KVStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            f"{type(module).__name__} has attention {'sinks' if softcap is None else 'soft-capping'}, which the native "
            "engine does not compute; use rollout.name=vllm or sglang for this model."
        )
    if attention_mask is not None:
        raise NotImplementedError(
            f"{type(module).__name__} has an attention mask of its own making, which the native engine does not read; "
            "use rollout.name=vllm or sglang for this model."
        )
    if kv_step is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand keywords of the model's call on to attention, by which the native "
            "engine gives it the cache; use rollout.name=vllm or sglang for this model."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int), "transformers numbers its attention layers"
    return kv_step.attend(layer, query, key, value, scale, sliding_window), None


def _continuation_mask(segment: Segment, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of the keys from `first` on the segment's tokens see."""
    positions = torch.arange(segment.start, segment.end, device=device).unsqueeze(-1)
    keys = torch.arange(first, segment.end, device=device)
    return keys <= positions if window is None else (keys <= positions) & (keys > positions - window)


def _flat(cached: torch.Tensor) -> torch.Tensor:
    return cached.view(-1, cached.shape[-1])


AttentionInterface.register(ATTENTION_NAME, _attention)
