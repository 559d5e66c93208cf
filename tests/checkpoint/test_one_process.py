"""Saving and loading in one process warns of nothing."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dovetail.checkpoint.sharded import BackgroundSave, load_sharded, save_sharded, take_snapshot, without_collectives

pytestmark = pytest.mark.unit


def test_one_process_saves_and_loads_without_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    kept = model.weight.detach().clone()
    gc.collect()  # a file that an earlier test left open warns when it is collected, and not inside
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_sharded(tmp_path / "a", model, None, extra={})
        background = BackgroundSave()
        background.start(tmp_path / "b", take_snapshot(model, None, extra={}, copied=True))
        background.finish()
        nn.init.zeros_(model.weight)
        load_sharded(tmp_path / "b", model, None)
    assert [str(entry.message) for entry in caught] == []
    assert torch.equal(model.weight, kept)


def test_other_warnings_of_the_process_are_left_alone() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = len(warnings.filters)
        assert without_collectives(1)
        assert without_collectives(1)
        assert not without_collectives(2)
        assert len(warnings.filters) == before + 1
        warnings.warn("torch.distributed is slow", UserWarning, stacklevel=1)
    assert len(caught) == 1


def test_torch_still_warns_of_what_it_was_told(tmp_path: Path) -> None:
    """When this fails, `checkpoint/sharded.py` has nothing left to do."""
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save({"x": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
