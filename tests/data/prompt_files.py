"""Small prompt files in every format, and a tokenizer to read them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail.config.data import DataConfig
from dovetail.data.files import prompt_row, write_rows
from dovetail.data.prompts import PromptDataset
from tests.models.tiny import tiny_tokenizer


def rows(count: int, *, source: str = "toy", length: int = 4) -> list[dict[str, Any]]:
    return [
        prompt_row(
            data_source=source,
            question=f"{source} {i} " + "x" * length,
            ground_truth=str(i),
            ability="math",
            extra_info={"index": i},
        )
        for i in range(count)
    ]


def save_dataset_folder(folder: Path, content: list[dict[str, Any]], order: list[int] | None = None) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` leaves it: Arrow streams, state.json, dataset_info.json."""
    folder.mkdir(parents=True)
    _write_stream(folder / "data-00000-of-00001.arrow", pa.Table.from_pylist(content))
    state: dict[str, Any] = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    if order is not None:
        _write_stream(folder / "indices.arrow", pa.table({"indices": pa.array(order, pa.uint64())}))
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def dataset(files: Any, *, tokenizer: Any = None, processor: Any = None, **settings: Any) -> PromptDataset:
    own = ("max_samples", "seed", "tools", "image_loader", "requires_ground_truth")
    options = {key: settings.pop(key) for key in own if key in settings}
    config = DataConfig(**{"max_prompt_length": 64, **settings})
    return PromptDataset(files, tokenizer or tiny_tokenizer(), config, processor, **options)


def toy_file(folder: Path, count: int, name: str = "toy.parquet", **kwargs: Any) -> str:
    return str(write_rows(rows(count, **kwargs), folder / name))


def _write_stream(file: Path, table: pa.Table) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
