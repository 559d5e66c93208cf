"""Files that run a command when somebody unpickles them, in every place of a checkpoint that could hold one."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata


class Payload:
    """Unpickled, it makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


def pickled(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(marker)))


def torch_saved(path: Path, marker: Path) -> None:
    torch.save(Payload(marker), path)


def in_metadata(shards: Path, marker: Path) -> None:
    """Inside a description that is otherwise right."""
    metadata = pickle.loads((shards / ".metadata").read_bytes())
    metadata.planner_data = Payload(marker)
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))


def in_tensor(shards: Path, marker: Path) -> None:
    _replace(shards, marker, lambda entry: isinstance(entry, TensorStorageMetadata))


def in_tensor_called_a_value(shards: Path, marker: Path) -> None:
    """A weight whose description says that it is a value: torch reads values without restriction."""
    _replace(shards, marker, lambda entry: isinstance(entry, TensorStorageMetadata), turn_into=BytesStorageMetadata())


def _replace(shards: Path, marker: Path, which: Callable[[Any], bool], *, turn_into: Any = None) -> None:
    metadata = pickle.loads((shards / ".metadata").read_bytes())
    name = next(name for name, entry in metadata.state_dict_metadata.items() if which(entry))
    index = next(index for index in metadata.storage_data if index.fqn == name)
    info = metadata.storage_data.pop(index)
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    file = shards / info.relative_path
    info.offset, info.length = file.stat().st_size, len(buffer.getvalue())
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    if turn_into is not None:
        metadata.state_dict_metadata[name] = turn_into
        index = type(index)(name)
    metadata.storage_data[index] = info
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
