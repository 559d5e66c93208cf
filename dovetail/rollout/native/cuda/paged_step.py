"""One step's attention over the pages: where each token's entries go, and what it attends to. Same for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from dovetail.models.exact import QUERY_BLOCK
from dovetail.rollout.native.cuda.kernels.ops import Ops
from dovetail.rollout.native.cuda.pages import PagePool
from dovetail.rollout.native.cuda.scheduler import Fill
from dovetail.rollout.native.cuda.transfer import upload


class PagedStep(Protocol):
    ops: Ops
    pool: PagePool
    targets: torch.Tensor
    locks: torch.Tensor | None
    max_length: int
    """No position of the step's tokens is larger."""

    def attention(self, layer: int, query: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
        """Attention of query (tokens, heads * head size) over the pages, which hold this step's own entries already.
        A token sees the last `window` tokens, itself included."""
        ...


class PlainAttend:
    """Serves `ATTENTION_NAME` of the Hugging Face modules, which hand over heads that are rotated already."""

    def __init__(self, step: PagedStep) -> None:
        self._step = step

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        flat_query, flat_key, flat_value = (x[0].transpose(0, 1).flatten(1).contiguous() for x in (query, key, value))
        pool = self._step.pool
        self._step.ops.rotate_and_store(
            flat_query, flat_key, flat_value, pool.keys[layer], pool.values[layer], self._step.targets, None
        )
        return self._step.attention(layer, flat_query, scaling, window).unsqueeze(0)


class PagedDecode:
    """One new token for every row."""

    def __init__(
        self,
        pool: PagePool,
        table: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        targets: torch.Tensor,
        num_splits: int,
        locks: torch.Tensor,
        ops: Ops,
    ) -> None:
        self.ops = ops
        self.pool = pool
        self.targets = targets
        self.locks: torch.Tensor | None = locks
        self.max_length = table.shape[1] * pool.shape.page_size
        self._table, self._slots, self._lengths, self._num_splits = table, slots, lengths, num_splits

    def attention(self, layer: int, query: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
        return self.ops.decode_attention(
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            self._table,
            self._slots,
            self._lengths,
            scaling,
            num_splits=self._num_splits,
            window=window,
        )


class PagedPrefill:
    """Pieces of sequences end to end: for each Fill the next `count` of its tokens."""

    locks = None

    def __init__(self, pool: PagePool, pieces: Sequence[tuple[Fill, int]], ops: Ops) -> None:
        self.ops = ops
        self.pool = pool
        size, device = pool.shape.page_size, pool.device
        counts = [count for _, count in pieces]
        starts = np.cumsum([0, *counts[:-1]])
        tokens, positions, targets = [], [], []
        for fill, count in pieces:
            where = np.arange(fill.done, fill.done + count)
            tokens.append(np.asarray(fill.sequence[fill.done : fill.done + count], dtype=np.int64))
            positions.append(where)
            targets.append(np.asarray(fill.pages, dtype=np.int64)[where // size] * size + where % size)
        packed = upload(np.stack([np.concatenate(x) for x in (tokens, positions, targets)]), torch.int64, device)
        self.tokens, self.positions, self.targets = packed
        blocks = [(i, first) for i, count in enumerate(counts) for first in range(0, count, QUERY_BLOCK)]
        self._blocks = upload(blocks, torch.int32, device)
        dones = [fill.done for fill, _ in pieces]
        self._segments = upload(np.stack([starts, counts, dones], axis=1), torch.int32, device)
        table = np.zeros((len(pieces), max(len(fill.pages) for fill, _ in pieces)), dtype=np.int32)
        for row, (fill, _) in enumerate(pieces):
            table[row, : len(fill.pages)] = fill.pages
        self._table = upload(table, torch.int32, device)
        self.max_length = table.shape[1] * size

    def attention(self, layer: int, query: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
        return self.ops.prefill_attention(
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            self._table,
            self._blocks,
            self._segments,
            scaling,
            block_size=QUERY_BLOCK,
            window=window,
        )
