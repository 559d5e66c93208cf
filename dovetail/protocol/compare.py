"""Say how values, columns and batches differ. NaN equals NaN; objects are compared deeply. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from dovetail.protocol.dataproto import DataProto

Column = torch.Tensor | np.ndarray


def describe_column(column: Column) -> str:
    """``float32[8, 512]``"""
    return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"


def batch_difference(left: DataProto, right: DataProto) -> str | None:
    """Say how two batches differ in columns or meta_info, or return None."""
    for part in ("tensors", "non_tensor_batch", "meta_info"):
        ours, theirs = getattr(left, part), getattr(right, part)
        if ours.keys() != theirs.keys():
            return f"{part}: keys {sorted(map(str, ours))} against {sorted(map(str, theirs))}"
    if len(left) != len(right):
        return f"{len(left)} rows against {len(right)}"
    others = right.columns
    for name, column in left.columns.items():
        difference = first_difference(column, others[name])
        if difference:
            return f"column {name!r}: {difference}"
    for key, value in left.meta_info.items():
        if not deep_equal(value, right.meta_info[key]):
            return f"meta_info[{key!r}]: {value!r} against {right.meta_info[key]!r}"
    return None


def first_difference(left: Column, right: Column, open_pairs: frozenset[tuple[int, int]] = frozenset()) -> str | None:
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
        row = _first_differing_array_row(np.asarray(left), np.asarray(right), open_pairs)
    if row is None:
        return None
    return f"row {row} is {_shorten(left[row])} against {_shorten(right[row])}"


def deep_equal(left: Any, right: Any, open_pairs: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Compare nested values: tensors and arrays by content, NaN equal to NaN, containers entry by entry.

    `open_pairs` are those under comparison already: values that contain themselves are equal if nothing else differs.
    """
    pair = (id(left), id(right))
    if left is right or pair in open_pairs:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return both and first_difference(left, right) is None
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        both = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
        return both and first_difference(left, right, open_pairs | {pair}) is None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        inner = open_pairs | {pair}
        return left.keys() == right.keys() and all(deep_equal(left[key], right[key], inner) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        inner = open_pairs | {pair}
        same = type(left) is type(right) and len(left) == len(right)
        return same and all(deep_equal(a, b, inner) for a, b in zip(left, right, strict=True))
    if isinstance(left, (float, np.floating)) and isinstance(right, (float, np.floating)) and left != left:
        return bool(right != right)
    return bool(left == right)


def _first_differing_row(left: torch.Tensor, right: torch.Tensor) -> int | None:
    # Bitwise first: it is one pass over memory and decides nearly every call.
    if torch.equal(left, right):
        return None
    differs = left != right
    if left.is_floating_point() or left.is_complex():
        differs &= ~(left.isnan() & right.isnan())
    rows = differs.reshape(len(left), -1).any(dim=1).nonzero().flatten()
    return int(rows[0]) if len(rows) else None


def _first_differing_array_row(
    left: np.ndarray, right: np.ndarray, open_pairs: frozenset[tuple[int, int]]
) -> int | None:
    if left.dtype == object or right.dtype == object:
        rows = (row for row in range(len(left)) if not deep_equal(left[row], right[row], open_pairs))
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
