"""Plain values in one safetensors file: tensors and arrays as tensors, all else as JSON. Reading it runs no code.

A value is None, a bool, a number, a string, bytes, a date or time, a list, a tuple, a dict, a numpy scalar or array, a
tensor or a PIL image, nested at will. Anything else is refused when it is written. An object that occurs twice is
written once.
"""

from __future__ import annotations

import importlib
import json
import os
import uuid
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_TREE = "tree.json"
_KIND = "!"  # the key that marks what JSON has no word for
_PLAIN = (str, int, float, bool, type(None))
# What tables hold and JSON does not: by kind, its type, how to write it, how to read it.
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
}


class PlainFileError(ValueError):
    """A file that `save_plain` did not write, or that is damaged. The message names it."""


def save_plain(value: Any, path: str | os.PathLike[str]) -> None:
    """Write `value` to `path` so that a reader sees the old file or the complete new one, never a part."""
    writer = _Writer()
    tree = json.dumps(writer.encode(value)).encode()
    writer.tensors[_TREE] = _bytes(tree)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        save_file(writer.tensors, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # as any other new file; safetensors makes private ones
        temporary.replace(target)
    except SafetensorError as error:  # a full disk comes as text
        raise OSError(f"{target} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_plain(path: str | os.PathLike[str]) -> Any:
    """Read what `save_plain` wrote; PlainFileError for any other file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        return _Reader(tensors).decode(json.loads(bytes(tensors.pop(_TREE).numpy())))
    except (SafetensorError, KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise PlainFileError(
            f"{os.fspath(path)} is damaged, or was not written by this version of dovetail ({error})"
        ) from error


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        # Keeps what it has seen alive: the id of a dead object may come back as another's.
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._around: set[int] = set()  # ids of the containers that the current value lies in

    def encode(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._around:
            raise ValueError(
                f"a {type(value).__name__} that contains itself cannot be written to a file; replace the entry."
            )
        self._around.add(id(value))
        try:
            return self._encode(value)
        finally:
            self._around.discard(id(value))

    def _encode(self, value: Any) -> Any:
        if type(value) is list:
            return [self.encode(entry) for entry in value]
        if type(value) is dict:
            if _KIND not in value and all(type(key) is str for key in value):
                return {key: self.encode(entry) for key, entry in value.items()}
            return {_KIND: "dict", "items": [[self.encode(key), self.encode(entry)] for key, entry in value.items()]}
        if type(value) is tuple:
            return {_KIND: "tuple", "items": [self.encode(entry) for entry in value]}
        if id(value) not in self._seen:
            self._seen[id(value)] = value, self._encode_other(value)
        return self._seen[id(value)][1]

    def _encode_other(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A copy: safetensors refuses tensors that share memory, as views and read-only columns do.
            return self._tensor("tensor", value.detach().as_subclass(torch.Tensor).cpu().contiguous().clone())
        if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
            entries = [self.encode(entry) for entry in value.reshape(-1).tolist()]
            return {_KIND: "objects", "items": entries, "shape": value.shape, "dtype": value.dtype.str}
        if isinstance(value, np.ndarray):
            return self._tensor("array", torch.from_numpy(np.ascontiguousarray(value).copy()), shape=value.shape)
        if isinstance(value, np.generic):
            return {_KIND: "scalar", "value": self.encode(value.item()), "dtype": value.dtype.str}
        if isinstance(value, bytes):
            return self._tensor("bytes", _bytes(value))
        if type(value).__module__.startswith("PIL.") and value.mode not in ("P", "PA"):
            return self._tensor("image", _bytes(value.tobytes()), mode=value.mode, size=value.size)
        for kind, (own, write, _) in _TEXTS.items():
            if type(value) is own:
                return {_KIND: kind, "text": write(value)}
        raise TypeError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be written to a file; keep to numbers, "
            "strings, lists, dicts, arrays and tensors."
        )

    def _tensor(self, kind: str, tensor: torch.Tensor, **facts: Any) -> dict[str, Any]:
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return {_KIND: kind, "name": name, **facts}


class _Reader:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, Any] = {}

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(entry) for entry in tree]
        if not isinstance(tree, dict):
            return tree
        if _KIND not in tree:
            return {key: self.decode(entry) for key, entry in tree.items()}
        if "name" not in tree:
            return self._decode_container(tree)
        if tree["name"] not in self._made:
            self._made[tree["name"]] = self._decode_tensor(tree, self._tensors[tree["name"]])
        return self._made[tree["name"]]

    def _decode_container(self, tree: dict[str, Any]) -> Any:
        kind = tree[_KIND]
        if kind == "dict":
            return {self.decode(key): self.decode(entry) for key, entry in tree["items"]}
        if kind == "tuple":
            return tuple(self.decode(entry) for entry in tree["items"])
        if kind == "scalar":
            return np.dtype(tree["dtype"]).type(self.decode(tree["value"]))
        if kind == "objects":
            array = np.empty(len(tree["items"]), dtype=object)
            for row, entry in enumerate(tree["items"]):  # assigned at once, lists of one length would become a matrix
                array[row] = self.decode(entry)
            return array.astype(np.dtype(tree["dtype"])).reshape(tree["shape"])
        return _TEXTS[kind][2](tree["text"])

    def _decode_tensor(self, tree: dict[str, Any], tensor: torch.Tensor) -> Any:
        kind = tree[_KIND]
        if kind == "tensor":
            return tensor
        if kind == "array":
            return tensor.numpy().reshape(tree["shape"])
        if kind == "bytes":
            return tensor.numpy().tobytes()
        if kind == "image":
            return importlib.import_module("PIL.Image").frombytes(
                tree["mode"], tuple(tree["size"]), tensor.numpy().tobytes()
            )
        raise ValueError(f"it holds a tensor of kind {kind!r}")


def _bytes(value: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())
