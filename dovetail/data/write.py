"""Write rows as parquet or JSON lines. The file appears whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.data.errors import DataError


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Write a `.parquet` or `.jsonl` file and return its path."""
    target = Path(path).expanduser()
    if not rows:
        raise DataError(f"there are no rows to write to {target}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if target.suffix == ".parquet":
            pq.write_table(_table(rows, target), partial)
        elif target.suffix == ".jsonl":
            partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        else:
            raise DataError(f"{target} ends in {target.suffix!r}; use .parquet or .jsonl.")
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return target


def _table(rows: Sequence[Mapping[str, Any]], target: Path) -> pa.Table:
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
    question: str,
    ground_truth: Any,
    ability: str,
    extra_info: Mapping[str, Any],
    system: str | None = None,
) -> dict[str, Any]:
    """One row with the columns that training reads."""
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": data_source,
        "prompt": [*messages, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }
