"""Keys and values of running sequences: one slot per sequence, slots 0..R-1 dense; and those of sessions between two
turns. Knows nothing of requests.

Dense slots make the decode batch a plain slice of the cache, so a decode step gathers nothing. Memory grows in slots
and in length when more or longer sequences come. Entries are always finite numbers: attention multiplies what lies past
the end of a shorter sequence by zero, and zero times a stray NaN would be NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_EXPERTS = -1
"""In the place of a layer: a token's routed experts, which go wherever its keys and values go."""
# Growing copies the live part, so the length grows in steps.
_LENGTH_STEP = 64


@dataclass(frozen=True)
class _Kept:
    """What a slot held for `tokens`: per layer (kv heads, tokens, head size)."""

    tokens: Sequence[int]
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]


class SlotKVCache:
    """Per layer two tensors (slots, kv heads, capacity, head size), created when a layer first writes.

    `max_kept_tokens` is for all sessions together.
    """

    def __init__(self, max_kept_tokens: int = 0) -> None:
        self._max_kept_tokens = max_kept_tokens
        self._random = random.Random(0)
        self.num_slots = 0
        self.capacity = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._kept: dict[str, _Kept] = {}
        self._num_kept_tokens = 0

    @property
    def nbytes(self) -> int:
        """Of slots and sessions. Other threads ask often: counts only, no walk over the sessions."""
        slots = sum(tensor.nbytes for tensor in (*self.keys.values(), *self.values.values()))
        return slots + slots * self._num_kept_tokens // max(1, self.num_slots * self.capacity)

    @torch.inference_mode()
    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` sequences of `length`; what is cached stays."""
        if num_slots <= self.num_slots and length <= self.capacity:
            return
        old_slots, old_length = self.num_slots, self.capacity
        self.num_slots = max(old_slots, num_slots)
        self.capacity = max(old_length, -(-length // _LENGTH_STEP) * _LENGTH_STEP)
        for side in (self.keys, self.values):
            for layer, old in side.items():
                new = old.new_zeros(self.num_slots, old.shape[1], self.capacity, old.shape[3])
                new[:old_slots, :, :old_length] = old
                side[layer] = new

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's two tensors. `key` and `value`, (..., kv heads, tokens, head size), say their shape and dtype."""
        if index not in self.keys:
            for side, example in ((self.keys, key), (self.values, value)):
                side[index] = example.new_zeros(self.num_slots, example.shape[-3], self.capacity, example.shape[-1])
        return self.keys[index], self.values[index]

    @torch.inference_mode()
    def put_experts(self, slot: int, first: int, experts: torch.Tensor) -> None:
        """Those of tokens from `first` on, `[n, layers, k]`."""
        entries = experts.flatten(1).unsqueeze(0)
        held, _ = self.layer(_EXPERTS, entries, entries[..., :0])
        held[slot, :, first : first + len(experts)] = entries

    def experts(self, slot: int, length: int) -> torch.Tensor:
        """Those of the first `length` tokens, `[length, layers * k]`."""
        return self.keys[_EXPERTS][slot, 0, :length]

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of a slot to another: a shared prompt, or a row moved to close a gap."""
        if source == target or length == 0:
            return
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def keep(self, session: str, slot: int, tokens: Sequence[int]) -> None:
        """Keep what the slot holds for `tokens`, for the session's next turn, if there is room.

        Any of the others goes for it, not the oldest: sessions take turns, and the oldest would be needed next.
        """
        self.forget_session(session)
        if len(tokens) > self._max_kept_tokens:
            return
        while self._num_kept_tokens + len(tokens) > self._max_kept_tokens:
            self.forget_session(self._random.choice(list(self._kept)))
        keys, values = (
            {layer: tensor[slot, :, : len(tokens)].clone() for layer, tensor in side.items()}
            for side in (self.keys, self.values)
        )
        self._kept[session] = _Kept(tokens, keys, values)
        self._num_kept_tokens += len(tokens)

    @torch.inference_mode()
    def restore(self, session: str, slot: int, tokens: Sequence[int]) -> int:
        """Put what the session has kept into the slot, as far as it is of `tokens`; the number of them."""
        kept = self.forget_session(session)
        if kept is None:
            return 0
        pairs = enumerate(zip(kept.tokens, tokens, strict=False))
        length = next((place for place, (old, new) in pairs if old != new), min(len(kept.tokens), len(tokens)))
        for side, old in ((self.keys, kept.keys), (self.values, kept.values)):
            for layer, tensor in old.items():
                side[layer][slot, :, :length] = tensor[:, :length]
        return length

    def forget_session(self, session: str) -> _Kept | None:
        """What was kept for it, if anything was."""
        kept = self._kept.pop(session, None)
        self._num_kept_tokens -= 0 if kept is None else len(kept.tokens)
        return kept

    def forget_sessions(self) -> None:
        self._kept.clear()
        self._num_kept_tokens = 0

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero every entry, in case the weights that wrote them had diverged."""
        self.forget_sessions()
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor.zero_()

    def free(self) -> None:
        self.forget_sessions()
        self.keys.clear()
        self.values.clear()
        self.num_slots = 0
        self.capacity = 0
