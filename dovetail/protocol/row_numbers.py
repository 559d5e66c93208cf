"""Work out which rows an operation picks, as row numbers. Knows nothing of columns or batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def as_row_indices(indices: Any, num_rows: int) -> torch.Tensor:
    """Turn a list, range, array, tensor or bool mask into int64 row numbers in ``[0, num_rows)``."""
    if isinstance(indices, torch.Tensor):
        index = indices.detach().cpu()
    else:
        array = np.asarray(indices)
        index = torch.from_numpy(array.astype(np.int64) if array.size == 0 and array.dtype != bool else array.copy())
    if index.ndim != 1:
        raise IndexError(f"rows are picked by a 1-D index or mask, got shape {tuple(index.shape)}.")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise IndexError(f"the mask has {len(index)} entries for {num_rows} rows; use one entry per row.")
        return index.nonzero().flatten()
    if index.is_floating_point() or index.is_complex():
        raise IndexError(f"rows are picked by integers or a bool mask, got dtype {index.dtype}.")
    index = index.to(torch.int64)
    outside = (index < -num_rows) | (index >= num_rows)
    if outside.any():
        raise IndexError(f"row {int(index[outside][0])} is out of range for a batch of {num_rows} rows.")
    return torch.where(index < 0, index + num_rows, index)


def permutation(indices: Any, num_rows: int) -> torch.Tensor:
    """Row numbers that hold every row once; anything else is refused."""
    index = as_row_indices(indices, num_rows)
    if not torch.equal(index.sort().values, torch.arange(num_rows)):
        raise ValueError(
            f"reorder takes a permutation of {num_rows} rows, got {len(index)} indices with "
            f"{len(index.unique())} different ones; use select_idxs to pick rows."
        )
    return index


def repeated(num_rows: int, times: int, interleave: bool) -> torch.Tensor:
    """Every row ``times`` times: ``0 0 1 1`` when interleaved, else ``0 1 0 1``."""
    if times < 0:
        raise ValueError(f"repeat_times={times} is negative; use 0 or more.")
    index = torch.arange(num_rows)
    return index.repeat_interleave(times) if interleave else index.repeat(times)


def filled_up(num_rows: int, added: int) -> torch.Tensor:
    """All rows, then ``added`` more that repeat them from the first on."""
    return torch.arange(num_rows + added) % num_rows


def mini_batches(
    num_rows: int, size: int, epochs: int, seed: int | None, dataloader_kwargs: Mapping[str, Any] | None
) -> Iterator[slice | torch.Tensor]:
    """The rows of each mini-batch: a slice, or an index when shuffled.

    Arguments are checked at the call, not when the first mini-batch is asked for.
    """
    options = dict(dataloader_kwargs or {})
    unknown = options.keys() - {"shuffle", "drop_last"}
    if unknown:
        raise ValueError(f"dataloader_kwargs has {sorted(unknown)}; known are 'shuffle' and 'drop_last'.")
    if size <= 0:
        raise ValueError(f"mini_batch_size={size} must be positive.")
    if num_rows % size and "drop_last" not in options:
        raise ValueError(
            f"{num_rows} rows do not divide into mini-batches of {size}; use a divisor, or say what "
            f"happens to the rest with dataloader_kwargs={{'drop_last': True or False}}."
        )
    return _mini_batches(num_rows, size, epochs, seed, **options)


def _mini_batches(
    num_rows: int, size: int, epochs: int, seed: int | None, shuffle: bool = False, drop_last: bool = False
) -> Iterator[slice | torch.Tensor]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    end = num_rows - num_rows % size if drop_last else num_rows
    for _ in range(epochs):
        order = torch.randperm(num_rows, generator=generator) if shuffle else None
        for start in range(0, end, size):
            rows = slice(start, start + size)
            yield rows if order is None else order[rows]
