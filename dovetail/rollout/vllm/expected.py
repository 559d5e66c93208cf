"""Which tensors a model takes, under their names on disk, read from its config alone. Loads no weights."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.weight_sync import ExpectedWeights


def expected_weights(model: str | Path, *, trust_remote_code: bool = False) -> ExpectedWeights:
    """Names and shapes that `update_weights` must bring: those of transformers' model with this config."""
    empty = _empty_model(model, trust_remote_code)
    first_name: dict[int, str] = {}
    ties: dict[str, str] = {}
    twins: dict[str, tuple[int, ...]] = {}
    for name, parameter in empty.named_parameters(remove_duplicate=False):
        own = first_name.setdefault(id(parameter), name)
        if own != name:
            ties[name] = own
            twins[name] = tuple(parameter.shape)
    shapes = {name: tuple(tensor.shape) for name, tensor in to_checkpoint_tensors(empty, empty.named_parameters())}
    stored = empty.state_dict().keys()
    buffers = {name: tuple(buffer.shape) for name, buffer in empty.named_buffers() if name in stored}
    return ExpectedWeights(shapes | twins, {name: own for name, own in ties.items() if own in shapes}, buffers)


def stop_token_ids(model: str | Path, *, trust_remote_code: bool = False) -> frozenset[int]:
    """The model's end-of-sequence ids: of its generation config, else of its config."""
    from transformers import AutoConfig, GenerationConfig

    sources: list[Any] = []
    with contextlib.suppress(OSError):  # a folder without generation_config.json
        sources.append(GenerationConfig.from_pretrained(model))
    sources.append(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code))
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def _empty_model(model: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    images = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)
