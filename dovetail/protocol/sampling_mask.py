"""Sampling masks: the token ids that top-k, top-p and min-p left to choose from, for every token of a response.

A mask is one int32 array `[2, kept]`: the place of a token in its response, rising, and an id that was kept there. So a
column of masks is as large as what was kept, whatever the largest set of it. Knows no engine and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

SAMPLING_MASK = "sampling_mask"
"""The column: a mask for each row."""
NOT_KEPT = -1
"""In place of an id where a padded set has no more."""


def make_mask(kept: Sequence[np.ndarray]) -> np.ndarray:
    """From the ids that were kept for each token of a response."""
    if not kept:
        return np.empty((2, 0), np.int32)
    places = np.repeat(np.arange(len(kept), dtype=np.int32), [len(ids) for ids in kept])
    return np.stack([places, np.concatenate(kept).astype(np.int32)])


def cut_mask(mask: np.ndarray | None, length: int) -> np.ndarray | None:
    """Of the first `length` tokens."""
    return None if mask is None else mask[:, mask[0] < length]


def join_masks(first: np.ndarray | None, length: int, second: np.ndarray | None) -> np.ndarray | None:
    """Of the `length` tokens that `first` is about, followed by those of `second`; None where neither has a mask."""
    if second is None:
        return first
    moved = second + np.array([[length], [0]], np.int32)
    return moved if first is None else np.concatenate([first, moved], axis=1)


def padded_sets(masks: Sequence[np.ndarray], length: int) -> torch.Tensor:
    """`[rows, length, k]` int64: the ids kept for each token, filled up with `NOT_KEPT`; k is the largest set."""
    counts = [np.bincount(mask[0], minlength=length) for mask in masks]
    most = max(1, max((int(count.max(initial=0)) for count in counts), default=0))
    sets = np.full((len(masks), length, most), NOT_KEPT, np.int64)
    for row, (mask, count) in enumerate(zip(masks, counts, strict=True)):
        places, ids = mask
        first = count.cumsum() - count
        sets[row, places, np.arange(len(places)) - first[places]] = ids
    return torch.from_numpy(sets)
