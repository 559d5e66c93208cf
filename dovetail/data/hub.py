"""Rows of data sets on the Hugging Face hub: `hf://datasets/org/name/...`.

  hf://datasets/org/name/data/train.parquet   one file, through huggingface_hub
  hf://datasets/org/name                      the split train, through the package `datasets` (extra `hub`)
  hf://datasets/org/name/test                 another split
  hf://datasets/org/name/main/test            a split of the configuration main

`datasets/` may be left out, and `org/name@revision` names a revision. Files land in the hub's own cache.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import pyarrow as pa

from dovetail.config.hub import DATA_PREFIX, HubError, fetch_file
from dovetail.data.errors import DataError


def fetch_data_file(path: str, endings: tuple[str, ...]) -> Path | None:
    """The local copy of the file that `path` names; None when it names a split."""
    repository, rest = _parts(path)
    if not rest or not rest[-1].endswith(endings):
        return None
    try:
        return fetch_file(repository, "/".join(rest), kind="dataset")
    except HubError as error:
        raise DataError(f"{path}: {error}") from error


def read_split(path: str) -> tuple[pa.Table, str]:
    """All rows of a split, and a digest of them."""
    repository, rest = _parts(path)
    if len(rest) > 2:
        raise DataError(
            f"{path} names neither a file (.parquet, .jsonl) nor a split; use {DATA_PREFIX}datasets/org/name/split."
        )
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{path} is a split of a data set, which the package datasets reads: pip install 'dovetail[hub]'. A file "
            f"of it needs no package: {DATA_PREFIX}datasets/{repository}/path/in/the/repository.parquet."
        ) from error
    name, _, revision = repository.partition("@")
    configuration, split = (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "train")
    try:
        rows = datasets.load_dataset(name, configuration, split=split, revision=revision or None)
    except (OSError, ValueError) as error:  # not found, offline, no such split: its messages say which
        raise DataError(
            f"{path} cannot be read from the hub or its cache: {error} Download it where there is network "
            f"(`hf download {name} --repo-type dataset --local-dir data/{name.rpartition('/')[2]}`) and give its files."
        ) from error
    table = rows.with_format("arrow")[:].replace_schema_metadata(None).combine_chunks()
    return table, _digest(table)


def _parts(path: str) -> tuple[str, list[str]]:
    parts = [part for part in path.removeprefix(DATA_PREFIX).removeprefix("datasets/").split("/") if part]
    if len(parts) < 2:
        raise DataError(
            f"{path} names no data set; use {DATA_PREFIX}datasets/org/name, with a split or a file behind it."
        )
    return "/".join(parts[:2]), parts[2:]


def _digest(table: pa.Table) -> str:
    sums = hashlib.blake2b(digest_size=16)
    for batch in table.to_batches(max_chunksize=4096):
        sums.update(batch.serialize())
    return sums.hexdigest()
