"""`hf://datasets/...`: files from the hub's cache, splits through the package `datasets`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dovetail.data.errors import DataError
from dovetail.data.files import read_rows, write_rows
from tests.hub import put_in_cache

pytestmark = pytest.mark.unit

ROWS = [{"prompt": f"say {i}", "data_source": "toy"} for i in range(5)]


@pytest.mark.parametrize("prefix", ["hf://datasets/org/words", "hf://org/words", "hf://datasets/org/words@main"])
def test_a_file_of_a_data_set_is_read_from_the_cache(cache: Path, tmp_path: Path, prefix: str) -> None:
    plain = write_rows(ROWS, tmp_path / "words" / "data" / "train.parquet")
    put_in_cache(cache, "org/words", tmp_path / "words", kind="dataset")
    rows = read_rows(f"{prefix}/data/train.parquet")
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.path == f"{prefix}/data/train.parquet"
    assert rows.digest == read_rows(str(plain)).digest


def test_offline_a_missing_file_is_named_with_the_folder_it_belongs_into(cache: Path) -> None:
    with pytest.raises(DataError) as raised:
        read_rows("hf://datasets/org/words/train.jsonl")
    message = str(raised.value)
    assert str(cache / "datasets--org--words") in message
    assert "hf download org/words --repo-type dataset" in message
    assert "HF_HUB_OFFLINE=1" in message


class FakeDatasets(SimpleNamespace):
    """`load_dataset` of the package, with the one data set org/words."""

    def load_dataset(self, name: str, configuration: str | None, *, split: str, revision: str | None) -> Any:
        self.asked = (name, configuration, split, revision)
        if name != "org/words":
            raise FileNotFoundError(f"Couldn't find any data file at {name}.")
        table = pa.Table.from_pylist(ROWS).replace_schema_metadata({"huggingface": "{}"})
        return SimpleNamespace(with_format=lambda kind: {"arrow": _Sliced(table)}[kind])


class _Sliced:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __getitem__(self, rows: slice) -> pa.Table:
        return self._table


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hf://datasets/org/words", ("org/words", None, "train", None)),
        ("hf://org/words/test", ("org/words", None, "test", None)),
        ("hf://datasets/org/words@v2/main/test", ("org/words", "main", "test", "v2")),
    ],
)
def test_a_split_is_read_through_datasets(monkeypatch: pytest.MonkeyPatch, path: str, asked: tuple) -> None:
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    rows = read_rows(path)
    assert fake.asked == asked
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.digest == read_rows(path).digest


def test_a_split_that_cannot_be_had_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets())
    with pytest.raises(DataError, match=r"hf://org/other cannot be read.*hf download org/other --repo-type dataset"):
        read_rows("hf://org/other")


def test_without_the_package_the_message_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'dovetail\[hub\]'.*hf://datasets/org/words/path/in"):
        read_rows("hf://org/words")


@pytest.mark.parametrize("path", ["hf://words", "hf://datasets/org/words/a/b/c"])
def test_what_names_no_data_set_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="hf://"):
        read_rows(path)
