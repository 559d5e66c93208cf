"""Plain values on disk: they come back as they were, and a file made by somebody else runs no code."""

from __future__ import annotations

import math
import os
import pickle
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dovetail.protocol.plain_file import PlainFileError, load_plain, save_plain
from tests.checkpoint.payload import Payload

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 2**70, 0.1 + 0.2, "text \N{SNOWMAN}", b"", b"\x00\xff"],
        {"a": (1, (2,)), "!": "a mark of ours", 3: "a key that is no string"},
        {"empty": {}, "tuple": (), "list": []},
        [datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), date(2026, 1, 2), time(3, 4), Decimal("0.10")],
    ],
)
def test_plain_values_come_back_with_their_types(value: Any, tmp_path: Path) -> None:
    save_plain(value, tmp_path / "file")
    assert repr(load_plain(tmp_path / "file")) == repr(value)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint32", "int64", "float16", "float64", "<U4", "object"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 2)])
def test_arrays_come_back(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.ones(shape, dtype=dtype)
    save_plain(array, tmp_path / "file")
    loaded = load_plain(tmp_path / "file")
    assert (loaded.dtype, loaded.shape, loaded.tolist()) == (array.dtype, array.shape, array.tolist())


def test_tensors_scalars_and_images_come_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    lists = np.empty(2, dtype=object)
    lists[:] = [(1, 2), (3, 4)]
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    value = {
        "half": torch.randn(3).bfloat16(),
        "view": shared.T,
        "twice": [shared, shared],
        "nan": math.nan,
        "number": np.float32(0.1),
        "lists": lists,
        "picture": picture,
    }
    save_plain(value, tmp_path / "file")
    loaded = load_plain(tmp_path / "file")
    assert torch.equal(loaded["half"], value["half"])
    assert torch.equal(loaded["view"], shared.T)
    assert loaded["twice"][0] is loaded["twice"][1], "what many rows share is written and read once"
    assert math.isnan(loaded["nan"])
    assert loaded["number"] == np.float32(0.1)
    assert loaded["number"].dtype == np.float32
    assert loaded["lists"].tolist() == [(1, 2), (3, 4)]
    assert np.array_equal(np.asarray(loaded["picture"]), np.asarray(picture))


@pytest.mark.parametrize("how", ["pickle", "torch", "cut", "garbage", "json"])
def test_any_other_file_is_refused_by_name_and_runs_nothing(how: str, tmp_path: Path) -> None:
    file, marker = tmp_path / "file", tmp_path / "marker"
    if how == "pickle":
        file.write_bytes(pickle.dumps(Payload(marker)))
    elif how == "torch":
        torch.save(Payload(marker), file)
    elif how == "cut":
        save_plain({"a": torch.ones(100)}, file)
        file.write_bytes(file.read_bytes()[:-50])
    elif how == "json":
        file.write_text("{}")
    else:
        file.write_bytes(os.urandom(1000))
    with pytest.raises(PlainFileError, match="file is damaged, or was not written by this version"):
        load_plain(file)
    assert not marker.exists()


def test_what_is_not_plain_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    save_plain(1, tmp_path / "file")
    with pytest.raises(TypeError, match="object cannot be written to a file"):
        save_plain([object()], tmp_path / "file")
    assert load_plain(tmp_path / "file") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_has_the_permissions_of_any_other_and_the_umask_of_the_process_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment of another umask, files that other threads make would be open to everybody."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask belongs to all threads"))
    (tmp_path / "other").touch()
    save_plain([1], tmp_path / "file")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]
