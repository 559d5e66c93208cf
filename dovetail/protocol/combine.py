"""Put columns of several batches together, and give columns new names. Refuses what would lose or mix values.

Works on columns by name; the rules for meta_info are in `dovetail.protocol.meta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dovetail.protocol.columns import Column, check_known, concat_arrays, concat_tensors
from dovetail.protocol.compare import first_difference
from dovetail.protocol.widths import concat_tokens, differ_in_width

Tensors = Mapping[str, torch.Tensor]
Arrays = Mapping[str, np.ndarray]


def concat_columns(
    tensors_of: Sequence[Tensors], arrays_of: Sequence[Arrays], pad_token_id: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Put the columns of batches below each other; every batch must have the same ones.

    Columns about responses become as wide as the widest; ``pad_token_id`` fills those that hold token ids.
    """
    for number, (tensors, arrays) in enumerate(zip(tensors_of, arrays_of, strict=True)):
        odd = sorted((tensors.keys() ^ tensors_of[0].keys()) | (arrays.keys() ^ arrays_of[0].keys()))
        if odd:
            raise ValueError(
                f"concat: batch {number} and the first differ in columns {odd}; select or pop them, and keep a "
                f"column a tensor, or a numpy array, in all batches."
            )
    return (
        {name: _concat_tensors(name, [part[name] for part in tensors_of], pad_token_id) for name in tensors_of[0]},
        {name: concat_arrays(name, [part[name] for part in arrays_of]) for name in arrays_of[0]},
    )


def _concat_tensors(name: str, parts: Sequence[torch.Tensor], pad_token_id: int) -> torch.Tensor:
    return concat_tokens(name, parts, pad_token_id) if differ_in_width(name, parts) else concat_tensors(name, parts)


def refuse_clashes(mine: Mapping[str, Column], others: Mapping[str, Column]) -> None:
    """Raise where a column that both have differs."""
    for name, column in others.items():
        difference = first_difference(mine[name], column) if name in mine else None
        if difference:
            raise ValueError(f"union: column {name!r} clashes: {difference}; pop or rename it in one batch first.")


def new_names(columns: Mapping[str, Column], old: str | Sequence[str], new: str | Sequence[str]) -> dict[str, str]:
    """The name of every column after ``old`` are renamed to ``new``."""
    old = [old] if isinstance(old, str) else list(old)
    new = [new] if isinstance(new, str) else list(new)
    if len(old) != len(new):
        raise ValueError(f"rename got {len(old)} old and {len(new)} new names; give one new name for each.")
    check_known("the batch", old, columns)
    renaming = dict(zip(old, new, strict=True))
    names = [renaming.get(name, name) for name in columns]
    clashes = sorted({name for name in names if names.count(name) > 1})
    if clashes:
        raise ValueError(f"rename would give several columns the name {clashes}; rename or pop the others first.")
    return dict(zip(columns, names, strict=True))
