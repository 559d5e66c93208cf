"""The ids that end a text of a model, as its folder says. Knows no chat template and no run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dovetail.models.load import load_config, load_generation_config

GENERATION_CONFIG = "generation_config.json"


def folder_stop_ids(
    path: str | Path, *, override_config: Mapping[str, Any] | None = None, **model_args: Any
) -> tuple[int, ...]:
    """Of the model in a folder, or on the hub. `model_args`: those of `load_config`."""
    config = load_config(path, override_config, **model_args)
    return model_stop_ids(load_generation_config(path, config, override_config), config)


def model_stop_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    """Of the generation config, else of the config, else of a composite config's text model."""
    for source in (generation_config, config, config.get_text_config()):
        if (eos := getattr(source, "eos_token_id", None)) is not None:
            return _as_tuple(eos)
    return ()


def name_stop_ids(folder: Path, config: Any, stop_ids: Collection[int]) -> None:
    """Make the generation config of a folder that is being written name these ids, and those first that it names; no
    others, which `override_config` has replaced.

    Nothing is written where it names them already. Other values stay as they are, also those that transformers would
    refuse to write.
    """
    file = folder / GENERATION_CONFIG
    if file.is_file():
        values = json.loads(file.read_text())
    else:  # readers take these from config.json only where this file is missing
        text = config.get_text_config()
        known = {name: getattr(text, name, None) for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
        values = {name: value for name, value in known.items() if value is not None}
    named = _as_tuple(values.get("eos_token_id")) or model_stop_ids(None, config)
    ids = [*(one for one in named if one in stop_ids), *sorted(set(stop_ids) - set(named))]
    if ids and ids != list(named):
        file.write_text(json.dumps({**values, "eos_token_id": ids if len(ids) > 1 else ids[0]}, indent=2) + "\n")


def _as_tuple(ids: Any) -> tuple[int, ...]:
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
