"""Keys and values of running sequences: one slot per sequence, slots 0..R-1 dense. Knows nothing of requests.

Dense slots make the decode batch a plain slice of the cache, so a decode step gathers nothing. Memory grows in slots
and in length when more or longer sequences come. Entries are always finite numbers: attention multiplies what lies past
the end of a shorter sequence by zero, and zero times a stray NaN would be NaN.
"""

from __future__ import annotations

import torch

# Growing copies the live part, so the length grows in steps.
_LENGTH_STEP = 64


class SlotKVCache:
    """Per layer two tensors (slots, kv heads, capacity, head size), created when a layer first writes."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.capacity = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys.values(), *self.values.values()))

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
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of a slot to another: a shared prompt, or a row moved to close a gap."""
        if source == target or length == 0:
            return
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero every entry, in case the weights that wrote them had diverged."""
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor.zero_()

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()
        self.num_slots = 0
        self.capacity = 0
