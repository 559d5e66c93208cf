"""Make, join and describe single columns (a tensor or a numpy array). Knows nothing of batches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
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
        layouts = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
        raise ValueError(
            f"column {name!r} has rows of {layouts} in different parts; cast or pad them to one dtype and shape first."
        )
    return torch.cat(list(parts))


def describe_column(column: Column) -> str:
    """``float32[8, 512]``"""
    return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"


def check_known(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``KeyError`` unless ``what`` has every wanted key."""
    there = set(known)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise KeyError(missing_keys_message(what, missing, there))


def missing_keys_message(what: str, missing: Iterable[str], known: Iterable[str]) -> str:
    """Name the missing keys, the nearest known ones and all that is there."""
    known, parts = sorted(known), []
    for key in missing:
        near = difflib.get_close_matches(str(key), known, n=1)
        parts.append(f"{key!r} (did you mean {near[0]!r}?)" if near else f"{key!r}")
    return f"{what} has no {', '.join(parts)}; it has {known}."
