"""Attention over the slot cache, plugged into Hugging Face models through `AttentionInterface`. Causal, full attention.

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
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention output (1, T, heads * head size) for query (1, heads, T, head size), key and value alike."""
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


class PrefillStep:
    """Ragged prefill: one SDPA call per segment, no padding between them."""

    def __init__(self, cache: SlotKVCache, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        self.segments = segments
        self.masks = [_continuation_mask(segment, device) if segment.start else None for segment in segments]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        cached_keys, cached_values = self.cache.layer(layer, key, value)
        num_heads, num_kv = query.shape[1], key.shape[1]
        outputs = []
        offset = 0
        for segment, mask in zip(self.segments, self.masks, strict=True):
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
                slot_keys[:, None, : segment.end].expand(-1, grouped.shape[1], -1, -1),
                slot_values[:, None, : segment.end].expand(-1, grouped.shape[1], -1, -1),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
            outputs.append(attended.flatten(0, 1).transpose(0, 1).reshape(segment.length, -1))
        return torch.cat(outputs).unsqueeze(0)


class ExactStep:
    """Segments of prompts or new tokens, one token after the other, as `models.exact` attends in the trainer."""

    def __init__(self, cache: SlotKVCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        self.segments = segments

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        cached_keys, cached_values = self.cache.layer(layer, key, value)
        outputs: list[torch.Tensor] = []
        for segment in self.segments:
            keys, values = cached_keys[segment.slot], cached_values[segment.slot]
            for position in range(segment.start, segment.end):
                token = len(outputs)
                keys[:, position], values[:, position] = key[0, :, token], value[0, :, token]
                seen = slice(position + 1)
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
        self.spans = [(first, last, max(lengths[first:last])) for first, last in spans]
        ragged = [min(lengths[first:last]) != longest for first, last, longest in self.spans]
        self.visible = (
            torch.arange(max(lengths), device=positions.device) <= positions.unsqueeze(-1) if any(ragged) else None
        )
        self.ragged = ragged
        self._masks: list[torch.Tensor | None] | None = None
        self._targets: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        cached_keys, cached_values = self.cache.layer(layer, key, value)
        num_rows, num_kv = key.shape[2], key.shape[1]
        targets = self._write_targets(num_kv)
        _flat(cached_keys).index_copy_(0, targets, key[0].transpose(0, 1).reshape(num_rows * num_kv, -1))
        _flat(cached_values).index_copy_(0, targets, value[0].transpose(0, 1).reshape(num_rows * num_kv, -1))
        folded = query[0].transpose(0, 1).unflatten(1, (num_kv, query.shape[1] // num_kv))
        outputs = [
            F.scaled_dot_product_attention(
                folded[first:last],
                cached_keys[first:last, :, :longest],
                cached_values[first:last, :, :longest],
                attn_mask=mask,
                scale=scaling,
            )
            for (first, last, longest), mask in zip(self.spans, self._span_masks(query.dtype), strict=True)
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

    def _span_masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        if self._masks is None:
            self._masks = [None] * len(self.spans)
            if self.visible is not None:
                # Additive, in the dtype of the query: SDPA on CPU is slower with a boolean mask.
                bias = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
                bias.masked_fill_(~self.visible, float("-inf"))
                for i, (first, last, longest) in enumerate(self.spans):
                    if self.ragged[i]:
                        self._masks[i] = bias[first:last, None, None, :longest]
        return self._masks


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            f"{type(module).__name__} uses attention soft-capping or sinks, which the native engine does not compute; "
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
    return kv_step.attend(layer, query, key, value, scale), None


def _continuation_mask(segment: Segment, device: torch.device) -> torch.Tensor:
    positions = torch.arange(segment.start, segment.end, device=device)
    return torch.arange(segment.end, device=device) <= positions.unsqueeze(-1)


def _flat(cached: torch.Tensor) -> torch.Tensor:
    return cached.view(-1, cached.shape[-1])


AttentionInterface.register(ATTENTION_NAME, _attention)
