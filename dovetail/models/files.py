"""The weight files of a model folder: which of them are read, and whether they are whole. Imports no torch, so that
`dovetail check` can look at them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dovetail.config.wording import name_some
from dovetail.models.errors import ModelError

INDEX = "model.safetensors.index.json"


def check_weight_files(folder: str | Path) -> None:
    """Raise ModelError or FileNotFoundError if a file is missing, cut or none of safetensors; reads headers only."""
    folder = Path(folder).expanduser()
    for file in safetensors_files(folder, read_index(folder)):
        open_safetensors(file, framework="np")


def open_safetensors(file: Path, framework: str) -> Any:
    """The open file, mapped. A file that is shorter than its header says is an error."""
    try:
        return safe_open(file, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors ({error}); download or export it again.") from error


def read_index(folder: Path) -> dict[str, str]:
    """File of each tensor, where the folder has an index; empty otherwise."""
    file = folder / INDEX
    if not file.exists():
        return {}
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(part) for name, part in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file} cannot be read as an index of safetensors ({type(error).__name__}: {error}); it needs a "
            "weight_map from tensor to file."
        ) from error


def safetensors_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """The files that hold the model."""
    if index:
        files = sorted({folder / part for part in index.values()})
        if missing := [file.name for file in files if not file.is_file()]:
            raise ModelError(
                f"{folder / INDEX} names {len(missing)} files that are not there: {name_some(missing)}; "
                "download or export the folder again."
            )
        return files
    if (folder / "model.safetensors").is_file():  # beside it may lie the same weights in another layout
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no safetensors; load it once with transformers and save_pretrained() to convert it."
        )
    return files
