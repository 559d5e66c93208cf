"""Read the files of torch.distributed.checkpoint without running code that somebody put into them.

torch reads `.metadata` with an unrestricted pickle, and everything that is no tensor with `weights_only=False`: either
runs whatever the file says. Here the metadata may name torch's own description classes only, and values must be plain.
The format on disk stays torch's own.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

_DCP = "torch.distributed.checkpoint"
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
# Records without behaviour, what they are made of, and the records that Megatron's own writer adds.
_ALLOWED: dict[str, set[str]] = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_DCP}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": {"OrderedDict"},
}  # fmt: skip


class UnsafeFileError(ValueError):
    """A file of a checkpoint that asks for more than plain values. The message says for what."""


class SafeReader(dcp.FileSystemReader):
    """torch's reader, with a metadata file that can only describe. UnsafeFileError for any other.

    The file is read here, before torch asks for it: torch logs a traceback and goes on to look for another file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self._metadata = self._described()
        except UnsafeFileError:
            raise
        except Exception as error:  # damaged bytes make a pickle raise anything
            raise UnsafeFileError(f".metadata is not readable ({type(error).__name__}: {error})") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def _described(self) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise UnsafeFileError(f".metadata holds a {type(metadata).__name__}, no description of tensors")
        for info in metadata.storage_data.values():
            path = PurePosixPath(info.relative_path)
            if path.is_absolute() or ".." in path.parts:
                raise UnsafeFileError(f".metadata points to {path}, outside of the checkpoint")
        known = getattr(metadata, "storage_meta", None) or StorageMeta()
        known.load_id = self.load_id
        metadata.storage_meta = known
        return metadata


def misfit(stored: Metadata, state: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why `state` (its parts, tensors by name) is not what was stored; None when it is.

    Weights that only the file has count too: torch would leave them out, and a shorter model would be loaded.
    """
    entries = stored.state_dict_metadata
    asked = {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}
    for name, tensor in asked.items():
        if (entry := entries.get(name)) is None:
            return f"it has no {name}"
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            return f"{name} has shape {tuple(entry.size)} in it and {tuple(tensor.shape)} in this run"
    surplus = (name for name in entries if name.startswith("model.") and name not in asked and "model" in state)
    return next((f"this run's model has no {name}" for name in surplus), None)


class PlainValues(DefaultLoadPlanner):
    """A planner that takes plain values only beside the tensors: learning rates, betas, flags."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """torch reads what it is given without restriction: it is given what a restricted read has made of it."""
        try:
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeFileError(
                f"{read_item.dest_index.fqn} is no plain value; it may be an attempt to run code"
            ) from error
        rewritten = io.BytesIO()
        torch.save(plain, rewritten)
        rewritten.seek(0)
        super().load_bytes(read_item, rewritten)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not is_dtype and global_name not in _ALLOWED.get(module_name, ()):
            raise UnsafeFileError(
                f".metadata asks for {module_name}.{global_name}, which no description of tensors needs; it may be an "
                "attempt to run code"
            )
        return super().find_class(module_name, global_name)
