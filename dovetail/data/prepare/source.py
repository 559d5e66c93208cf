"""Find the raw rows of a data set: in a local file or folder, or on the Hugging Face hub when it can be reached."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dovetail.data.errors import DataError
from dovetail.data.files import read_rows

_ENDINGS = (".jsonl", ".json", ".parquet", ".ndjson")


def local_rows(path: str, split: str) -> list[dict[str, Any]]:
    """All rows of a file, or of the file in a folder whose name begins with the split."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "state.json").exists():
        files = sorted(file for file in folder.rglob(f"{split}*") if file.suffix in _ENDINGS)
        if not files:
            raise DataError(f"{folder} has no file {split}*.jsonl or {split}*.parquet; give the file itself.")
        return [row for file in files for row in _all(str(file))]
    return _all(str(folder))


def hub_rows(repository: str, split: str, *, config: str | None = None) -> list[dict[str, Any]]:
    """All rows of a split on the hub, through the `datasets` package."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"downloading {repository} needs the package datasets; pip install datasets, or give a local file."
        ) from error
    try:
        return list(datasets.load_dataset(repository, config, split=split))
    except (OSError, ValueError) as error:
        raise DataError(f"{repository} cannot be downloaded: {error} Give a local file or folder instead.") from error


def _all(path: str) -> list[dict[str, Any]]:
    rows = read_rows(path)
    return [rows[row] for row in range(len(rows))]
