"""Rows of files: parquet, JSON lines, folders of Hugging Face `datasets`, and the hub. Knows nothing of prompts.

  hf://datasets/org/name/data/train.parquet   one file, through huggingface_hub
  hf://datasets/org/name                      the split train, through the package `datasets` (extra `hub`)
  hf://datasets/org/name/test                 another split
  hf://datasets/org/name/main/test            a split of the configuration main

`datasets/` may be left out, and `org/name@revision` names a revision. Files land in the hub's own cache.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.config.data import DataConfig
from dovetail.config.hub import DATA_PREFIX, HubError, fetch_file
from dovetail.config.root import DovetailConfig
from dovetail.data.errors import DataError, DataNotHereError
from dovetail.observability.disk import replacing

UNNAMED_SOURCE = "custom"
"""The `data_source` of rows that name none."""
_CHUNK = 1024
_JSON = (".jsonl", ".json", ".ndjson")
ENDINGS = (".parquet", *_JSON)


def fetch_data_file(path: str, endings: tuple[str, ...]) -> Path | None:
    """The local copy of the file that `path` names; None when it names a split."""
    repository, rest = _parts(path)
    if not rest or not rest[-1].endswith(endings):
        return None
    try:
        return fetch_file(repository, "/".join(rest), kind="dataset")
    except HubError as error:
        raise DataNotHereError(f"{path}: {error}") from error


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
        kind = DataNotHereError if isinstance(error, ConnectionError) else DataError
        raise kind(
            f"{path} cannot be read from the hub or its cache: {error} Download it where there is network "
            f"(`hf download {name} --repo-type dataset --local-dir data/{name.rpartition('/')[2]}`) and give its files."
        ) from error
    table = rows.with_format("arrow")[:].replace_schema_metadata(None).combine_chunks()
    return table, _table_digest(table)


def _parts(path: str) -> tuple[str, list[str]]:
    parts = [part for part in path.removeprefix(DATA_PREFIX).removeprefix("datasets/").split("/") if part]
    if len(parts) < 2:
        raise DataError(
            f"{path} names no data set; use {DATA_PREFIX}datasets/org/name, with a split or a file behind it."
        )
    return "/".join(parts[:2]), parts[2:]


def _table_digest(table: pa.Table) -> str:
    sums = hashlib.blake2b(digest_size=16)
    for batch in table.to_batches(max_chunksize=4096):
        sums.update(batch.serialize())
    return sums.hexdigest()


class Rows(ABC):
    """The rows of one file, in order. `digest` changes when the content of the file does."""

    path: str
    digest: str
    columns: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def chunks(self, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """All rows in order with these columns only, some at a time."""
        for start in range(0, len(self), _CHUNK):
            rows = (self[row] for row in range(start, min(start + _CHUNK, len(self))))
            yield [{name: row.get(name) for name in columns} for row in rows]


class TableRows(Rows):
    """Rows of an Arrow table; turned into Python values one by one."""

    def __init__(self, path: str, digest: str, table: pa.Table) -> None:
        self.path, self.digest = path, digest
        self.columns = tuple(table.column_names)
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._table.slice(row, 1).to_pylist()[0]

    def chunks(self, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        for batch in self._table.select(list(columns)).to_batches(max_chunksize=_CHUNK):
            yield batch.to_pylist()


class ListRows(Rows):
    """Rows that are Python values already."""

    def __init__(self, path: str, digest: str, rows: list[dict[str, Any]]) -> None:
        self.path, self.digest = path, digest
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[row]


def read_rows(path: str) -> Rows:
    """Open one file or folder, here or on the hub (`hf://datasets/...`); the ending says what it is."""
    if path.startswith(DATA_PREFIX):
        fetched = fetch_data_file(path, ENDINGS)
        if fetched is None:
            table, digest = read_split(path)
            return TableRows(path, digest, table)
        source = fetched
    else:
        source = Path(path).expanduser()
    if not os.path.exists(source):  # Path.exists raises where a name is too long
        raise DataError(
            f"there is no file {path} (looked at {source.absolute()}); `dovetail data` writes prompt files, its --help "
            "says which."
        )
    if source.is_dir():
        return TableRows(path, _digest(sorted(source.glob("*.arrow"))), _read_dataset_folder(source))
    if source.suffix == ".parquet":
        return TableRows(path, _digest([source]), _read_parquet(source))
    if source.suffix in _JSON:
        return ListRows(path, _digest([source]), list(_read_json(source)))
    raise DataError(f"{path} ends in {source.suffix!r}; use .parquet, .jsonl, or a folder of `datasets.save_to_disk`.")


def without_nulls(value: Any) -> Any:
    """A value of an Arrow table as it was before: Arrow gives every dict the keys of all dicts in its column, so that
    the arguments of a call, and the schemas of tools, have those of the others with a null."""
    value = value.tolist() if isinstance(value, np.ndarray) else value  # a list in a frame of pandas
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def read_columns(path: str) -> tuple[str, ...]:
    """The columns of a file, without reading its rows; of JSON lines those of the first. Empty without rows."""
    source = Path(path).expanduser()
    if source.suffix == ".parquet" and source.is_file():
        with _explaining(source, "parquet file"):
            file = pq.ParquetFile(source)
            return tuple(file.schema_arrow.names) if file.metadata.num_rows else ()
    if source.suffix in _JSON and source.is_file():
        first = itertools.islice(_read_json(source), _CHUNK)
        return tuple(dict.fromkeys(name for row in first for name in row))
    return read_rows(path).columns


def count_rows(path: str) -> int:
    """Rows of a file, of JSON lines without reading what they hold."""
    source = Path(path).expanduser()
    if source.suffix == ".parquet" and source.is_file():
        with _explaining(source, "parquet file"):
            return pq.ParquetFile(source).metadata.num_rows
    if source.suffix in _JSON and source.is_file():
        with open(source, "rb") as file:
            if not file.read(64).lstrip().startswith(b"["):
                file.seek(0)
                return sum(1 for line in file if line.strip())
    return len(read_rows(path))


def needed_columns(data: DataConfig, *, scored_by_rules: bool) -> dict[str, str]:
    """The columns that every row must have, each with the way out where a file lacks it.

    Without the built-in rules `data_source` only groups the metrics; a row that lacks it is of `UNNAMED_SOURCE`.
    """
    needed = {data.prompt_key: "; set data.prompt_key to the column that holds it"}
    if scored_by_rules or data.reward_fn_key != "data_source":
        needed[data.reward_fn_key] = (
            "; set data.reward_fn_key to the column that names the reward rule, or give a "
            "reward function (reward=FILE.py:NAME, in full custom_reward_function.path), which needs none"
        )
    if scored_by_rules:
        needed["reward_model"] = (
            "; it holds {'ground_truth': ...}. `dovetail data jsonl FILE --out FOLDER --question-field ... "
            "--answer-field ...` writes all columns from questions and answers"
        )
    return needed


def needs_ground_truth(config: DovetailConfig) -> bool:
    """Whether the built-in rules score: a network, a user's function, an environment or an agent's own program may do
    without a truth."""
    agent = config.actor_rollout_ref.rollout.agent
    scored_elsewhere = config.reward_model.enable or agent.environment is not None or agent.command is not None
    listed = config.reward_model.reward_kwargs.get("rewards")
    scored_elsewhere |= bool(listed) and all("path" in entry for entry in listed)
    return config.scores_training and config.custom_reward_function.path is None and not scored_elsewhere


def _read_parquet(source: Path) -> pa.Table:
    with _explaining(source, "parquet file"):
        return pq.read_table(source)


@contextmanager
def _explaining(source: Path, kind: str) -> Iterator[None]:
    """Name the file: the libraries that read it do not."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} is not a readable {kind}: {error}") from error


def _read_json(source: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one at a time; a JSON list is read whole."""
    with _explaining(source, "text file"), open(source, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith("["):
                yield from _objects(source, enumerate(_parse(source, 1, line + lines.read()), start=1))
                return
            yield from _objects(source, [(number, _parse(source, number, line))])


def _objects(source: Path, entries: Iterable[tuple[int, Any]]) -> Iterator[dict[str, Any]]:
    for number, entry in entries:
        if not isinstance(entry, dict):
            raise DataError(f"{source}:{number} is a {type(entry).__name__}; every line must be a JSON object.")
        yield entry


def _parse(source: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}:{number} is not JSON: {error}") from error


def _read_description(file: Path) -> dict[str, Any]:
    content = _parse(file, 1, file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise DataError(f"{file} is a {type(content).__name__}; it must be a JSON object of `datasets.save_to_disk`.")
    return content


def _read_dataset_folder(folder: Path) -> pa.Table:
    """The Arrow files that `Dataset.save_to_disk` lists in state.json; the `datasets` package is not needed."""
    if (folder / "dataset_dict.json").exists():
        splits = _read_description(folder / "dataset_dict.json").get("splits") or ["train"]
        raise DataError(f"{folder} holds the splits {', '.join(splits)}; give one of them, {folder / splits[0]}.")
    if not (folder / "state.json").exists():
        raise DataError(f"{folder} has no state.json; a folder must come from `datasets.Dataset.save_to_disk`.")
    state = _read_description(folder / "state.json")
    names = [entry["filename"] for entry in state.get("_data_files") or []]
    if not names:
        raise DataError(f"{folder} lists no data files in state.json; the dataset is empty.")
    table = pa.concat_tables([_read_arrow(folder / name) for name in names])
    indices = [entry["filename"] for entry in state.get("_indices_data_files") or []]
    if indices:
        order = pa.concat_tables([_read_arrow(folder / name) for name in indices])
        table = table.take(order.column(0))
    return table


def _read_arrow(file: Path) -> pa.Table:
    with _explaining(file, "Arrow file"), pa.memory_map(str(file)) as source:
        return pa.ipc.open_stream(source).read_all()


def _digest(files: Sequence[Path]) -> str:
    sums = hashlib.blake2b(digest_size=16)
    for file in files:
        with open(file, "rb") as content:
            sums.update(hashlib.file_digest(content, "blake2b").digest())
    return sums.hexdigest()


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Write a `.parquet` or `.jsonl` file and return its path."""
    target = Path(path).expanduser()
    if not rows:
        raise DataError(f"there are no rows to write to {target}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as partial:
        if target.suffix == ".parquet":
            pq.write_table(_as_table(rows, target), partial)
        elif target.suffix == ".jsonl":
            lines = (json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in rows)
            partial.write_text("".join(lines), encoding="utf-8")
        else:
            raise DataError(f"{target} ends in {target.suffix!r}; use .parquet or .jsonl.")
    return target


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")


def _as_table(rows: Sequence[Mapping[str, Any]], target: Path) -> pa.Table:
    try:
        return pa.Table.from_pylist([dict(row) for row in rows])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"the rows do not fit the columns of {target}: {error}. Give every row values of the same kind, or write "
            ".jsonl (`dovetail data ... --format jsonl`), whose rows may differ."
        ) from error


def prompt_row(
    *,
    data_source: str,
    question: str | Sequence[Mapping[str, Any]],
    ground_truth: Any,
    ability: str,
    extra_info: Mapping[str, Any],
    system: str | None = None,
) -> dict[str, Any]:
    """One row with the columns that training reads. `system` takes the place of a system message in `question`."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    if system:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }
