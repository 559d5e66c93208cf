"""Parts that are None, and object columns whose entries contain themselves."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.protocol import DataProto

pytestmark = pytest.mark.unit


def _cyclic(value: int = 1, *, with_tensor: bool = False) -> DataProto:
    itself: list[Any] = [value, torch.ones(2)] if with_tensor else [value]
    itself.append(itself)
    mapping: dict[str, Any] = {"list": itself, "pair": (itself, value)}
    mapping["me"] = mapping
    array = np.empty(1, dtype=object)
    array[0] = array
    return DataProto.from_dict({"rows": torch.zeros(3)}, {"odd": [itself, mapping, array]}, {"meta": mapping})


def test_none_is_an_empty_part() -> None:
    batch = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # pyrefly: ignore[bad-argument-type]
    assert (len(batch), batch.non_tensor_batch, batch.meta_info) == (0, {}, {})
    assert (
        len(DataProto.concat([DataProto.from_dict({"a": torch.zeros(2)}), DataProto.from_dict({"a": torch.ones(2)})]))
        == 4
    )


def test_entries_that_contain_themselves_are_compared() -> None:
    assert _cyclic().equals(_cyclic())
    assert not _cyclic().equals(_cyclic(2))
    assert _cyclic(with_tensor=True).equals(_cyclic(with_tensor=True))
    assert len(_cyclic().union(_cyclic())) == 3


@pytest.mark.parametrize("with_tensor", [False, True])
def test_entries_that_contain_themselves_travel(with_tensor: bool) -> None:
    batch = _cyclic(with_tensor=with_tensor)
    arrived = pickle.loads(pickle.dumps(batch))
    assert arrived.equals(batch)
    itself, mapping, array = arrived.non_tensor_batch["odd"]
    assert itself[-1] is itself
    assert mapping["me"] is mapping
    assert array[0] is array
    assert mapping["list"] is itself


def test_entries_that_contain_themselves_are_not_written_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a list that contains itself cannot be written to a file"):
        _cyclic().save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_stands_in_two_places_is_written(tmp_path: Path) -> None:
    entry = [1, {"a": 2}]
    batch = DataProto.from_dict({"rows": torch.zeros(2)}, {"odd": [entry, entry]}, {"again": [entry, entry]})
    batch.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").equals(batch)
