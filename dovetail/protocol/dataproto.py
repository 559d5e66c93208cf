"""`DataProto`: the batch that travels between the controller and its workers. Knows nothing of models or of Ray.

Three parts: ``batch``, a TensorDict with one batch dimension; ``non_tensor_batch``, numpy columns with the same rows;
``meta_info``, facts about the whole batch. Columns are never changed in place by these methods. Slices and chunks are
views; picking rows by index copies. It refuses columns of unequal length, nested tensors and clashing values.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from dovetail.protocol import row_numbers
from dovetail.protocol.columns import (
    PAD_TOKEN_ID,
    as_array,
    check_known,
    check_parts,
    check_tensors,
    concat_columns,
    new_names,
    refuse_clashes,
)
from dovetail.protocol.compare import Column, batch_difference
from dovetail.protocol.item import DataProtoItem
from dovetail.protocol.meta import merge_meta_info, unite_meta_info
from dovetail.protocol.plain_file import PlainFileError, load_plain, save_plain
from dovetail.protocol.readonly import is_readonly
from dovetail.protocol.serialization import pack_objects, pack_tensor, put_together, taken_apart

AUTO_PADDING = "auto_padding"
"""Key of meta_info: ``chunk`` may pad. Set by ``from_dict(auto_padding=True)``."""

PADDING_COLUMN = "__padding__"
"""Bool numpy column that ``chunk`` adds when it pads; ``concat`` drops the rows it marks."""


_FILE = "dataproto"


@dataclass(eq=False)
class DataProto:
    """A batch of rows. See the module's docstring for its parts and `docs/protocol.md` for its rules."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # verl's users write None for a part that is empty.
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    # ---- making ----

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a batch from tensors and from arrays or sequences with one entry per row."""
        tensors = dict(tensors or {})
        check_tensors(tensors)
        batch = _tensordict(tensors, len(next(iter(tensors.values())))) if tensors else None
        arrays = {name: as_array(values) for name, values in (non_tensors or {}).items()}
        meta = dict(meta_info or {})
        if auto_padding:
            meta[AUTO_PADDING] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, *, auto_padding: bool = False
    ) -> DataProto:
        """Build a batch from one dict: tensors go to ``batch``, arrays and lists to ``non_tensor_batch``."""
        for name, value in data.items():
            if not isinstance(value, (torch.Tensor, np.ndarray, list, tuple)):
                raise TypeError(f"column {name!r} is a {type(value).__name__}; use a tensor, a numpy array or a list.")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in data.items() if not isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """Build a batch from a TensorDict with one batch dimension.

        Tensors stay tensors over the same memory. Columns of other data (`NonTensorStack`) become numpy columns; data
        that is not per row (`NonTensorData`) becomes meta_info, which ``meta_info`` adds to.
        """
        if tensor_dict is None:
            return cls(meta_info=dict(meta_info or {}))
        if len(tensor_dict.batch_size) != 1:
            raise ValueError(f"a batch has one batch dimension, the TensorDict has {list(tensor_dict.batch_size)}.")
        tensors, others, facts = taken_apart(tensor_dict)
        return cls.from_dict(tensors, others, unite_meta_info(facts, dict(meta_info or {})))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict with all columns; numpy columns as `NonTensorStack`, meta_info as `NonTensorData`.

        A fact may not have the name of a column. `from_tensordict` gives the batch back.
        """
        return put_together(self.tensors, self.non_tensor_batch, self.meta_info, len(self))

    # ---- looking ----

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.non_tensor_batch

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor columns by name; a new dict over the same tensors."""
        if self.batch is None:
            return {}
        return {str(name): cast(torch.Tensor, tensor) for name, tensor in self.batch.items()}

    @property
    def columns(self) -> dict[str, Column]:
        """All columns by name, tensors first; a new dict over the same data."""
        return {**self.tensors, **self.non_tensor_batch}

    def is_empty(self) -> bool:
        """Whether there are no rows."""
        return len(self) == 0

    def is_padding_enabled(self) -> bool:
        """Whether ``chunk`` may pad to equal parts."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def check_consistency(self) -> None:
        """Raise unless every column has the same number of rows and a type that travels."""
        check_parts(self.batch, self.non_tensor_batch)

    def difference(self, other: DataProto) -> str | None:
        """Say how two batches differ in columns or meta_info, or return None. NaN equals NaN."""
        return batch_difference(self, other)

    def equals(self, other: DataProto) -> bool:
        """Whether both batches hold the same columns, rows and meta_info."""
        return self.difference(other) is None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and numpy columns. Objects count as pointers."""
        return sum(column.nbytes for column in self.columns.values())

    # ---- rows ----

    def __getitem__(self, item: Any) -> Any:
        """An int gives a `DataProtoItem`, a slice a view, an index or bool mask a copy of those rows."""
        if isinstance(item, slice):
            return self._with_rows(lambda column: column[item], lambda column: column[item])
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            row = int(item)
            if not -len(self) <= row < len(self):
                raise IndexError(f"row {row} is out of range for a batch of {len(self)} rows.")
            return DataProtoItem(
                batch=None if self.batch is None else self.batch[row],
                non_tensor_batch={name: array[row] for name, array in self.non_tensor_batch.items()},
                meta_info=dict(self.meta_info),
            )
        if isinstance(item, (list, tuple, range, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        raise TypeError(f"rows are picked by int, slice, index or bool mask, not by {type(item).__name__}.")

    def select_idxs(self, idxs: Any) -> DataProto:
        """Copy the rows that a list, array, tensor or bool mask picks, in that order."""
        index = row_numbers.as_row_indices(idxs, len(self))
        index_np = index.numpy()
        return self._with_rows(
            lambda tensor: tensor.index_select(0, index.to(tensor.device)), lambda array: array[index_np]
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows ``[start:end:step]``, as a view."""
        return self[slice(start, end, step)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat all rows: ``a a b b`` when interleaved, else ``a b a b``."""
        return self.select_idxs(row_numbers.repeated(len(self), repeat_times, interleave))

    def reorder(self, indices: Any) -> None:
        """Permute the rows of every column, in place: row ``i`` becomes what row ``indices[i]`` was."""
        order = row_numbers.permutation(indices, len(self))
        tensors, rows = self.tensors, len(self)
        self.non_tensor_batch = {name: array[order.numpy()] for name, array in self.non_tensor_batch.items()}
        if self.batch is not None:
            # Column by column, so that a second copy of the whole batch is never held.
            self.batch = None
            for name in list(tensors):
                tensors[name] = tensors[name].index_select(0, order.to(tensors[name].device))
            self.batch = _tensordict(tensors, rows)

    def split(self, split_size: int) -> list[DataProto]:
        """Views of ``split_size`` rows each; the last one may be shorter."""
        if split_size <= 0:
            raise ValueError(f"split_size={split_size} must be positive.")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int, auto_padding: bool | None = None) -> list[DataProto]:
        """Views of equal length, one per rank.

        With padding allowed (the argument, else meta_info's ``auto_padding``) a length that does not divide is filled
        with copies of the first rows, marked in the ``__padding__`` column; `concat` drops them again.
        """
        if chunks <= 0:
            raise ValueError(f"chunks={chunks} must be positive.")
        padded, rest = self, len(self) % chunks
        if rest:
            allowed = self.is_padding_enabled() if auto_padding is None else auto_padding
            if not allowed:
                raise ValueError(
                    f"{len(self)} rows do not divide into {chunks} equal chunks; use a multiple of {chunks}, or allow "
                    f"padding with chunk({chunks}, auto_padding=True) or meta_info['{AUTO_PADDING}'] = True."
                )
            padded = self._padded(chunks - rest)
        size = len(padded) // chunks
        return [padded[rank * size : (rank + 1) * size] for rank in range(chunks)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches over ``epochs`` passes; every pass gives each row once.

        ``dataloader_kwargs`` knows ``shuffle`` (a new order each epoch, fixed by ``seed``) and ``drop_last`` (needed
        when the rows do not divide: True leaves the rest out, False gives a shorter last mini-batch).
        """
        picked = row_numbers.mini_batches(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self[index] for index in picked)

    # ---- columns ----

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A batch with only these columns, over the same data. None keeps all of that part."""
        kept = self._pick(
            list(self.tensors) if batch_keys is None else list(batch_keys),
            list(self.non_tensor_batch) if non_tensor_batch_keys is None else list(non_tensor_batch_keys),
            list(self.meta_info) if meta_info_keys is None else list(meta_info_keys),
        )
        return copy.deepcopy(kept) if deepcopy else kept

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take these columns and facts out of the batch and return them. None takes nothing of that part."""
        taken = self._pick(list(batch_keys or []), list(non_tensor_batch_keys or []), list(meta_info_keys or []))
        rest = {name: tensor for name, tensor in self.tensors.items() if name not in taken.tensors}
        if taken.tensors:
            # A batch of only numpy columns has no TensorDict: an empty one would still claim a number of rows.
            self.batch = _tensordict(rest, len(self)) if rest else None
        self.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in taken.non_tensor_batch}
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in taken.meta_info}
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename columns, in place; returns the batch."""
        names = new_names(self.columns, old_keys, new_keys)
        if self.batch is not None:
            self.batch = _tensordict({names[name]: tensor for name, tensor in self.tensors.items()}, len(self))
        self.non_tensor_batch = {names[name]: array for name, array in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and facts of ``other``, in place; returns the batch.

        A column that both have must hold equal values; a clash is refused before anything is changed.
        """
        if self.columns and other.columns and len(self) != len(other):
            raise ValueError(f"union of {len(self)} rows with {len(other)} rows; both batches need the same rows.")
        mine = self.columns
        refuse_clashes(mine, other.columns)
        meta_info = unite_meta_info(self.meta_info, other.meta_info)
        tensors = {**self.tensors, **{name: tensor for name, tensor in other.tensors.items() if name not in mine}}
        if tensors:
            self.batch = _tensordict(tensors, len(self) or len(other))
        new = {name: array for name, array in other.non_tensor_batch.items() if name not in mine}
        self.non_tensor_batch = {**self.non_tensor_batch, **new}
        self.meta_info = meta_info
        return self

    # ---- whole batches ----

    @classmethod
    def concat(cls, data: Sequence[DataProto]) -> DataProto:
        """Put batches below each other. Batches without any column add only their meta_info.

        ``metrics`` become lists, ``timing`` keeps the slowest, other facts must agree (see `dovetail.protocol.meta`).
        Rows that `chunk` added as padding are dropped. Columns about responses become as wide as the widest.
        """
        meta_info = merge_meta_info([part.meta_info for part in data])
        parts = [part for part in data if part.columns]
        if not parts:
            return cls(meta_info=meta_info)
        pad_token_id = int(meta_info.get(PAD_TOKEN_ID, 0))
        columns = [part.tensors for part in parts], [part.non_tensor_batch for part in parts]
        tensors, arrays = concat_columns(*columns, pad_token_id)
        batch = _tensordict(tensors, sum(len(part) for part in parts)) if tensors else None
        joined = cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)
        return joined.without_padding()

    def without_padding(self) -> DataProto:
        """The rows that `chunk` did not add as padding."""
        if PADDING_COLUMN not in self.non_tensor_batch:
            return self
        real = self.select_idxs(~self.non_tensor_batch[PADDING_COLUMN].astype(bool))
        real.pop(non_tensor_batch_keys=[PADDING_COLUMN])
        return real

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors to a device, in place; returns the batch."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def writable(self) -> DataProto:
        """A batch whose columns may be written in place: shared memory is copied, private memory is not."""
        tensors = {name: t.clone() if is_readonly(t) else t for name, t in self.tensors.items()}
        arrays = {name: a if a.flags.writeable else a.copy() for name, a in self.non_tensor_batch.items()}
        batch = _tensordict(tensors, len(self)) if self.batch is not None else None
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=dict(self.meta_info))

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write the batch to one file; the file appears complete or not at all."""
        rows = None if self.batch is None else len(self)
        save_plain({_FILE: [rows, self.tensors, self.non_tensor_batch, self.meta_info]}, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Read a batch that `save_to_disk` wrote. Reading runs no code; PlainFileError for any other file."""
        loaded = load_plain(filepath)
        if not isinstance(loaded, dict) or list(loaded) != [_FILE]:
            raise PlainFileError(f"{os.fspath(filepath)} holds no DataProto.")
        batch = DataProto()
        batch.__setstate__(tuple(loaded[_FILE]))
        return batch

    def __copy__(self) -> DataProto:
        # copy.copy would hand the pickling state over as it is, buffers instead of tensors.
        return self.select()

    def __getstate__(self) -> tuple[Any, ...]:
        rows = None if self.batch is None else len(self)
        tensors = {name: pack_tensor(tensor) for name, tensor in self.tensors.items()}
        memo: dict[int, Any] = {}
        arrays = {name: pack_objects(array, memo) for name, array in self.non_tensor_batch.items()}
        return rows, tensors, arrays, self.meta_info

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        rows, tensors, self.non_tensor_batch, self.meta_info = state
        self.batch = None if rows is None else _tensordict(tensors, rows)

    # ---- inside ----

    def _with_rows(
        self, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_array: Callable[[np.ndarray], np.ndarray]
    ) -> DataProto:
        tensors = {name: of_tensor(tensor) for name, tensor in self.tensors.items()}
        arrays = {name: of_array(array) for name, array in self.non_tensor_batch.items()}
        batch = None
        if self.batch is not None:
            rows = len(next(iter(tensors.values()))) if tensors else len(of_array(np.arange(len(self))))
            batch = _tensordict(tensors, rows)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=dict(self.meta_info))

    def _pick(self, tensors: list[str], arrays: list[str], facts: list[str]) -> DataProto:
        check_known("batch", tensors, self.tensors)
        check_known("non_tensor_batch", arrays, self.non_tensor_batch)
        check_known("meta_info", facts, self.meta_info)
        mine = self.tensors
        return type(self)(
            batch=_tensordict({name: mine[name] for name in tensors}, len(self)) if tensors else None,
            non_tensor_batch={name: self.non_tensor_batch[name] for name in arrays},
            meta_info={name: self.meta_info[name] for name in facts},
        )

    def _padded(self, num_rows: int) -> DataProto:
        index = row_numbers.filled_up(len(self), num_rows)
        padded = self.select_idxs(index)
        padded.non_tensor_batch[PADDING_COLUMN] = np.arange(len(index)) >= len(self)
        return padded


def _tensordict(tensors: Mapping[str, torch.Tensor], rows: int) -> TensorDict:
    return TensorDict(dict(tensors), batch_size=[rows])
