"""Which tensors SGLang's model takes, under their names on disk. Loads no weights."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dovetail.rollout.vllm.expected import expected_weights as expected_by_transformers
from dovetail.weight_sync import ExpectedWeights

_TRAINERS_TRANSFORMERS = (5, 16)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_weights(
    model: str | Path, override_config: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> ExpectedWeights:
    """Names and shapes that `update_weights` must bring: those of transformers' model, which trainers send.

    Beside SGLang there may be a transformers older than dovetail's models need (0.5.18 pins 5.12). No trainer runs
    there, so nothing is overridden, and the names are read off the folder's weights.
    """
    numbers = importlib.metadata.version("transformers").split(".")[:2]
    if tuple(map(int, numbers)) >= _TRAINERS_TRANSFORMERS:
        return expected_by_transformers(model, override_config, trust_remote_code=trust_remote_code)
    return _expected_by_folder(Path(model))


def _expected_by_folder(folder: Path) -> ExpectedWeights:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    if not shapes:
        raise ValueError(f"{folder} holds no safetensors file; SGLang's model cannot be compared with anything.")
    tied = bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False))
    if not tied or _EMBEDDING not in shapes:
        return ExpectedWeights(shapes)
    return ExpectedWeights(shapes | {_HEAD: shapes[_EMBEDDING]}, {_HEAD: _EMBEDDING})
