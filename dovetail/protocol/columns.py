"""Columns of batches (tensors or numpy arrays): make, check, rename and put them together. Knows no DataProto.

Refuses what would lose or mix values. Responses are padded on the right, and a batch is as wide as its longest one, so
columns about responses are brought to one width when batches are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from dovetail.config.wording import did_you_mean
from dovetail.protocol.compare import Column, first_difference

PAD_TOKEN_ID = "pad_token_id"
"""Key of meta_info: what `responses` and `input_ids` are padded with. 0 where nobody said."""

_TOKEN_IDS = frozenset({"responses", "input_ids"})
_POSITIONS = "position_ids"
# Everything else is 0 on padding: masks, log-probs, scores, advantages.
_FILL = {"weight_version": -1}

RESPONSE_COLUMNS = frozenset(
    {
        *("responses", "response_mask", "rollout_log_probs", "weight_version"),
        *("rm_scores", "token_level_scores", "token_level_rewards"),
        *("old_log_probs", "entropys", "sum_pi_squared", "ref_log_prob", "values", "rollout_is_weights"),
        *("interpolation_weights", "advantages", "returns"),
    }
)
SEQUENCE_COLUMNS = frozenset({"input_ids", "attention_mask", _POSITIONS})
"""Prompt and response: as many columns more as the response has."""
Tensors = Mapping[str, torch.Tensor]
Arrays = Mapping[str, np.ndarray]


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


def check_known(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``KeyError`` unless ``what`` has every wanted key."""
    there = set(known)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise KeyError(missing_keys_message(what, missing, there))


def missing_keys_message(what: str, missing: Iterable[str], known: Iterable[str]) -> str:
    """Name the missing keys, the nearest known ones and all that is there."""
    missing, known = list(missing), sorted(known)
    hints = "".join(dict.fromkeys(did_you_mean(key, known) for key in missing))
    return f"{what} has no {', '.join(map(repr, missing))}.{hints} It has {known}."


def concat_tokens(name: str, parts: Sequence[torch.Tensor], pad_token_id: int) -> torch.Tensor:
    """Put a column's parts below each other, as wide as the widest. They must differ in width alone."""
    widest = max(part.shape[-1] for part in parts)
    rows = sum(len(part) for part in parts)
    fill = pad_token_id if name in _TOKEN_IDS else _FILL.get(name, 0)
    # One column of the result, filled part by part: padded copies of the parts would be held beside it.
    joined = parts[0].new_empty((rows, *parts[0].shape[1:-1], widest))
    first = 0
    for part in parts:
        place, width = joined[first : first + len(part)], part.shape[-1]
        place[..., :width] = part
        if width < widest:
            # Padding after the last token keeps its position.
            place[..., width:] = part[..., -1:] if name == _POSITIONS else fill
        first += len(part)
    return joined


def differ_in_width(name: str, parts: Sequence[torch.Tensor]) -> bool:
    """Whether these are parts of a column about responses that are alike but for their widths."""
    if name not in RESPONSE_COLUMNS | SEQUENCE_COLUMNS or len({part.shape[-1] for part in parts if part.dim()}) <= 1:
        return False
    return len({(part.dtype, part.dim(), part.shape[1:-1]) for part in parts}) == 1


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
    tensors_of = _with_equal_prompts(tensors_of, pad_token_id)
    return (
        {name: _concat(name, [part[name] for part in tensors_of], pad_token_id) for name in tensors_of[0]},
        {name: concat_arrays(name, [part[name] for part in arrays_of]) for name in arrays_of[0]},
    )


def _with_equal_prompts(tensors_of: Sequence[Tensors], pad_token_id: int) -> Sequence[Tensors]:
    """Batches whose prompts are equally wide: those of an agent's later segments may be longer than others."""
    widths = [part["prompts"].shape[-1] if "prompts" in part else 0 for part in tensors_of]
    if len(set(widths)) <= 1:
        return tensors_of
    padded = []
    for part, width in zip(tensors_of, widths, strict=True):
        missing = (max(widths) - width, 0)
        fills = {"prompts": pad_token_id, "input_ids": pad_token_id, "attention_mask": 0, _POSITIONS: 0}
        columns = {
            name: torch.nn.functional.pad(part[name], missing, value=fill)
            for name, fill in fills.items()
            if name in part
        }
        padded.append({**part, **columns})
    return padded


def _concat(name: str, parts: Sequence[torch.Tensor], pad_token_id: int) -> torch.Tensor:
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


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise unless every value is a tensor column, and all have the same number of rows."""
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    _check_lengths({name: len(tensor) for name, tensor in tensors.items()})


def check_parts(batch: TensorDict | None, arrays: Mapping[str, Any]) -> None:
    """Raise unless tensors and numpy columns have the same number of rows, types that travel and different names."""
    lengths: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    if batch is not None:
        if len(batch.batch_size) != 1:
            raise ValueError(f"batch has batch_size {tuple(batch.batch_size)}; it must have one dimension, rows.")
        tensors = {str(name): tensor for name, tensor in batch.items()}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        lengths["(batch)"] = int(batch.batch_size[0])
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"non_tensor_batch[{name!r}] is a {type(array).__name__}; use a numpy array (DataProto.from_dict "
                f"converts sequences)."
            )
        if array.ndim == 0:
            raise ValueError(f"non_tensor_batch[{name!r}] is a scalar; a column has one entry per row.")
        lengths[name] = len(array)
    _check_lengths(lengths)
    twice = tensors.keys() & arrays.keys()
    if twice:
        raise ValueError(f"columns {sorted(twice)} are both tensors and numpy arrays; rename one of each.")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"batch[{name!r}] is a {type(value).__name__}; what is no tensor goes to non_tensor_batch.")
    if value.is_nested:
        raise TypeError(f"batch[{name!r}] is a nested tensor; pad it, or put one tensor per row in an object column.")
    if value.ndim == 0:
        raise ValueError(f"batch[{name!r}] is a scalar; a column has one entry per row.")


def _check_lengths(lengths: Mapping[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns have different numbers of rows: {dict(lengths)}; give each one entry per row.")
