"""Keys and values in pages that sequences share and hand back. Knows nothing of requests, schedules or models.

A page holds `page_size` tokens of every layer. Pages are counted by their holders: the samples of one prompt hold its
full pages together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dovetail.rollout.native.cuda.transfer import upload

FP8 = torch.float8_e4m3fn


def cache_dtype_of(wanted: Literal["auto", "fp8"], weights: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of keys and values; ValueError where the device does not know it."""
    if wanted == "auto":
        return weights
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"kv_cache_dtype=fp8 needs compute capability 8.9, {name} has less; use auto.")
    return FP8


def as_bytes(pages: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index, which float8 is not."""
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_size: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_size
        return per_token * self.page_size * self.dtype.itemsize

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


class PagePool:
    """`keys` and `values` are (layers, pages, kv heads, page size, head size)."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.num_pages = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)
        self._free: list[int] = []
        self._holders: list[int] = []

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def resize(self, num_pages: int) -> None:
        """New, empty memory for so many pages; 0 gives it back. Every page must have been released."""
        assert self.num_free == self.num_pages, "pages are still held"
        self.keys = self.values = torch.empty(0)
        if num_pages:
            s = self.shape
            size = (s.num_layers, num_pages, s.num_kv_heads, s.page_size, s.head_size)
            self.keys = torch.empty(size, dtype=s.dtype, device=self.device)
            self.values = torch.empty(size, dtype=s.dtype, device=self.device)
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder; there must be so many."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} has no holder to share with"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free.append(page)

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages: (source, target)."""
        if not pairs:
            return
        indices = upload([[source for source, _ in pairs], [target for _, target in pairs]], torch.int64, self.device)
        for side in (self.keys, self.values):
            # Layer by layer: the copy in between is as large as what is copied.
            for layer in as_bytes(side):
                layer.index_copy_(0, indices[1], layer.index_select(0, indices[0]))
