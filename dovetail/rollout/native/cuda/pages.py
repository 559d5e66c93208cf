"""Keys and values in pages that sequences share and hand back. Knows nothing of requests, schedules or models.

A page holds `page_size` tokens of every layer. Pages are counted by their holders: the samples of one prompt hold its
full pages together.

A full page can be published under its tokens and those before it, which form a tree: a node is a prefix, and a page is
the edge from a node to the node one block of tokens further. A published page without a holder is kept until its memory
is needed, least recently used first. Every change of weights starts a new tree: the nodes of an older one lead nowhere.
"""

from __future__ import annotations

import itertools
from array import array
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
    expert_bytes: int = 0
    """Of a token's routed experts, where they are kept beside its keys and values."""

    @property
    def page_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_size
        return self.page_size * (per_token * self.dtype.itemsize + self.expert_bytes)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


class PagePool:
    """`keys` and `values` are (layers, pages, kv heads, page size, head size), `experts` (1, pages, page size, bytes),
    with a page more for tokens that are not stored."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.num_pages = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)
        self.experts = torch.empty(0)
        self._free: list[int] = []
        self._holders: list[int] = []
        # Published pages: page by (node, tokens of the block), the reverse, and the node that a page leads to.
        self._page_at: dict[tuple[int, bytes], int] = {}
        self._place_of: dict[int, tuple[int, bytes]] = {}
        self._node_after: dict[int, int] = {}
        self._kept: dict[int, None] = {}
        """Published pages without a holder, least recently used first."""
        self._nodes = itertools.count()
        self.root = next(self._nodes)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.experts.nbytes

    @property
    def num_free(self) -> int:
        """Pages that `take` can give; pages that are only kept are among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @torch.inference_mode()
    def resize(self, num_pages: int) -> None:
        """Memory for more pages, with what the pages hold; 0 gives it back, and then no page may have a holder."""
        assert num_pages >= self.num_pages or (not num_pages and self.num_free == self.num_pages), "pages are held"
        if not num_pages:
            self.forget()
            self._free.clear()
        elif len(self._free) == self.num_pages:
            self.keys = self.values = self.experts = torch.empty(0)  # nothing to copy: the old memory serves the new
        s = self.shape
        of_heads = (s.num_layers, num_pages, s.num_kv_heads, s.page_size, s.head_size)
        self.keys = self._resized(self.keys, of_heads, s.dtype)
        self.values = self._resized(self.values, of_heads, s.dtype)
        if s.expert_bytes:
            size = (1, num_pages + bool(num_pages), s.page_size, s.expert_bytes)
            self.experts = self._resized(self.experts, size, torch.uint8)
        self._free = [*range(num_pages - 1, self.num_pages - 1, -1), *self._free]
        self._holders = self._holders[:num_pages] + [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    def _resized(self, old: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not size[1]:
            return torch.empty(0)
        new = torch.empty(size, dtype=dtype, device=self.device)
        if old.numel():
            as_bytes(new)[:, : self.num_pages].copy_(as_bytes(old)[:, : self.num_pages])
        return new

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder; there must be so many."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        while len(self._free) < count:
            self._evict(next(iter(self._kept)))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which have one or are kept."""
        for page in pages:
            if self._holders[page] == 0:
                assert page in self._kept, f"page {page} holds nothing to share"
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        # From the end: of a sequence that is kept, the last page goes first, since it is of no use without the others.
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                if page in self._place_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def match(self, node: int, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Published pages that hold these tokens, which follow the prefix `node`, as far as there are any; and the
        node that they lead to. The caller has to `share` them before the next `take`."""
        pages = []
        for block in self._blocks(tokens):
            page = self._page_at.get((node, block))
            if page is None:
                break
            pages.append(page)
            node = self._node_after[page]
        return pages, node

    def publish(self, node: int, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Let `match` find full pages that hold these tokens; returns the node they lead to. Pages of a tree that was
        given up are not published: other weights computed them."""
        if node < self.root:
            return node
        for block, page in zip(self._blocks(tokens), pages, strict=True):
            # Where two sequences computed the same block, the first page serves both.
            first = self._page_at.get((node, block))
            if first is None:
                assert page not in self._place_of, f"page {page} holds one block, and was published under another"
                self._page_at[node, block] = first = page
                self._place_of[page] = node, block
                self._node_after[page] = next(self._nodes)
            node = self._node_after[first]
        return node

    def forget(self) -> None:
        """Start a new tree: what was published cannot be found any more, and what was only kept is free."""
        self._free.extend(self._kept)
        for table in (self._kept, self._page_at, self._place_of, self._node_after):
            table.clear()
        self.root = next(self._nodes)

    def _evict(self, page: int) -> None:
        del self._kept[page]
        del self._page_at[self._place_of.pop(page)]
        del self._node_after[page]
        self._free.append(page)

    def _blocks(self, tokens: Sequence[int]) -> Iterable[bytes]:
        """Full blocks of tokens as bytes, which are hashed and compared faster than tuples."""
        whole = array("i", tokens)
        size = self.shape.page_size
        return (whole[first : first + size].tobytes() for first in range(0, len(whole) - size + 1, size))

    def put_experts(self, targets: torch.Tensor, experts: torch.Tensor) -> None:
        """Of tokens at page * page size + offset, -1 for those that are not stored: `[n, layers, k]`."""
        places = self.experts[0].flatten(0, 1)
        spare = self.num_pages * self.shape.page_size
        places.index_copy_(0, torch.where(targets < 0, spare, targets).long(), experts.flatten(1).view(torch.uint8))

    def experts_of(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[torch.Tensor]:
        """On the host, `[length, bytes]` for each sequence: its pages and its length. Waits for the device."""
        held = upload([page for pages, _ in sequences for page in pages], torch.int64, self.device)
        of_sequences = self.experts[0].index_select(0, held).cpu().split([len(pages) for pages, _ in sequences])
        return [part.flatten(0, 1)[:length] for part, (_, length) in zip(of_sequences, sequences, strict=True)]

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages: (source, target)."""
        if not pairs:
            return
        indices = upload([[source for source, _ in pairs], [target for _, target in pairs]], torch.int64, self.device)
        sides = (self.keys, self.values, self.experts)
        for side in sides if self.shape.expert_bytes else sides[:2]:
            # Layer by layer: the copy in between is as large as what is copied.
            for layer in as_bytes(side):
                layer.index_copy_(0, indices[1], layer.index_select(0, indices[0]))
