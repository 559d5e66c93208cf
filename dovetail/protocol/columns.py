"""Row operations and comparison on single columns (a tensor or a numpy array). Knows nothing of batches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Column = torch.Tensor | np.ndarray


def as_array(values: Any) -> np.ndarray:
    """Turn a sequence into an object column with one entry per row. An array is taken as it is.

    ``np.array([[1, 2], [3, 4]], dtype=object)`` would make a 2-D array of numbers; a column of two lists is meant.
    """
    if isinstance(values, np.ndarray):
        return values
    rows = list(values)
    column = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        column[i] = row
    return column


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


def concat_arrays(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate numpy columns on rows. Mixed kinds become objects: numpy would turn numbers into strings."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"column {name!r} has row shapes {sorted(shapes)} in different parts; make them equal first.")
    numeric = all(part.dtype.kind in "biufc" for part in parts)
    if not numeric and len({part.dtype.kind for part in parts}) > 1:
        return np.concatenate([part.astype(object) for part in parts])
    return np.concatenate(parts)


def concat_tensors(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensor columns on rows; refuse mixed dtypes and row shapes, which ``torch.cat`` would promote."""
    kinds = list(dict.fromkeys((str(part.dtype), tuple(part.shape[1:])) for part in parts))
    if len(kinds) > 1:
        found = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
        raise ValueError(
            f"column {name!r} has rows of {found} in different parts; cast or pad them to one dtype and shape first."
        )
    return torch.cat(list(parts))


def first_difference(left: Column, right: Column) -> str | None:
    """Say where two columns differ, or return None. NaN equals NaN; object entries are compared deeply."""
    left_kind, right_kind = describe_column(left), describe_column(right)
    if isinstance(left, torch.Tensor) != isinstance(right, torch.Tensor):
        return f"{left_kind} against {right_kind}"
    if tuple(left.shape) != tuple(right.shape):
        return f"{left_kind} against {right_kind}"
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype:
            return f"{left_kind} against {right_kind}"
        row = _first_differing_row(left.detach().cpu(), right.detach().cpu())
    else:
        row = _first_differing_array_row(np.asarray(left), np.asarray(right))
    if row is None:
        return None
    return f"row {row} is {_shorten(left[row])} against {_shorten(right[row])}"


def deep_equal(left: Any, right: Any) -> bool:
    """Compare nested values: tensors and arrays by content, NaN equal to NaN, containers entry by entry."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return both and first_difference(left, right) is None
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        both = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
        return both and first_difference(left, right) is None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(deep_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        same = type(left) is type(right) and len(left) == len(right)
        return same and all(deep_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (float, np.floating)) and isinstance(right, (float, np.floating)) and left != left:
        return bool(right != right)
    return bool(left == right)


def describe_column(column: Column) -> str:
    """``float32[8, 512]``"""
    return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"


def missing_keys_message(what: str, missing: Iterable[str], known: Iterable[str]) -> str:
    """Name the missing keys, the nearest known ones and all that is there."""
    known, parts = sorted(known), []
    for key in missing:
        near = difflib.get_close_matches(str(key), known, n=1)
        parts.append(f"{key!r} (did you mean {near[0]!r}?)" if near else f"{key!r}")
    return f"{what} has no {', '.join(parts)}; it has {known}."


def _first_differing_row(left: torch.Tensor, right: torch.Tensor) -> int | None:
    # Bitwise first: it is one pass over memory and settles nearly every call.
    if torch.equal(left, right):
        return None
    differs = left != right
    if left.is_floating_point() or left.is_complex():
        differs &= ~(left.isnan() & right.isnan())
    rows = differs.reshape(len(left), -1).any(dim=1).nonzero().flatten()
    return int(rows[0]) if len(rows) else None


def _first_differing_array_row(left: np.ndarray, right: np.ndarray) -> int | None:
    if left.dtype == object or right.dtype == object:
        rows = (row for row in range(len(left)) if not deep_equal(left[row], right[row]))
        return next(rows, None)
    if left.dtype.kind != right.dtype.kind:
        return 0 if len(left) else None
    differs = left != right
    if left.dtype.kind in "fc":
        differs &= ~(np.isnan(left) & np.isnan(right))
    rows = np.flatnonzero(differs.reshape(len(left), -1).any(axis=1)) if len(left) else np.empty(0)
    return int(rows[0]) if len(rows) else None


def _shorten(value: Any, limit: int = 80) -> str:
    text = repr(value).replace("\n", "")
    return text if len(text) <= limit else text[: limit - 3] + "..."
