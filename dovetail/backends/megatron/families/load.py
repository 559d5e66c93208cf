"""Hugging Face safetensors into Megatron chunks: each rank reads the slices it holds, one tensor at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.backends.megatron.families.local_weights import (
    HEAD,
    HEAD_BIAS,
    LocalWeight,
    experts_per_rank,
    local_weights,
    shared_by,
    with_expert_of,
)
from dovetail.backends.megatron.families.shards import read_shard
from dovetail.models.errors import ModelError
from dovetail.models.weights import CheckpointTensor, iter_checkpoint_tensors, refuse_not_finite, scalar_head

if TYPE_CHECKING:
    from dovetail.backends.megatron.families.base import MegatronFamily
    from dovetail.backends.megatron.parts import MegatronModel

logger = logging.getLogger(__name__)

_LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")


@torch.no_grad()
def load_chunks(family: MegatronFamily, model: MegatronModel, folder: Path) -> None:
    """Fill every weight of every chunk of this rank."""
    files = CheckpointSlices(folder)
    per_rank = experts_per_rank(model)
    for weight in local_weights(model):
        if model.role != "policy" and weight.name in (HEAD, HEAD_BIAS):
            name = weight.name.replace("output_layer", "score")
            weight.tensor.copy_(scalar_head(folder, name, tuple(weight.tensor.shape)))
            continue
        _fill(family, model, weight, with_expert_of(weight.name, model.layout.ep_rank, per_rank), files)
    _say_what_is_left_out(files, model)


class CheckpointSlices:
    """Parts of the tensors of a folder, read when asked for. Files stay open and mapped; nothing is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tensors: Mapping[str, CheckpointTensor] = dict(iter_checkpoint_tensors(folder))
        # A bare model (saved from `AutoModel`) has no `model.` in front of its names.
        self._bare = "model.embed_tokens.weight" not in self.tensors and "embed_tokens.weight" in self.tensors

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        """`start:stop` of a tensor along `dim`; all of it when `dim` is None."""
        stored = name.removeprefix("model.") if self._bare else name
        if stored not in self.tensors:
            raise ModelError(f"{self._folder} holds no weights for {stored}; is it another model?")
        if f"{stored}_scale_inv" in self.tensors:
            raise ModelError(
                f"{stored} in {self._folder} is quantised (it has a {stored}_scale_inv); convert it to bfloat16 first."
            )
        tensor = self.tensors[stored]
        if dim is None:
            values = tensor.load()
        else:
            part = tensor.handle.get_slice(stored)
            values = part[start:stop] if dim == 0 else part[:, start:stop]
        refuse_not_finite(values, stored, self._folder)
        return values


def _fill(
    family: MegatronFamily, model: MegatronModel, weight: LocalWeight, name: str, files: CheckpointSlices
) -> None:
    _, part, parts = shared_by(model, name)
    read_shard(family.layout(model, name), weight.tensor, files.read, part=part, parts=parts)


def _say_what_is_left_out(files: CheckpointSlices, model: MegatronModel) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    numbers = [int(match[1]) for name in files.tensors if (match := _LAYER_NUMBER.match(name))]
    extra = sorted({number for number in numbers if number >= model.hf_config.num_hidden_layers})
    if extra:
        logger.warning(
            "layers %s are multi-token-prediction layers: they are neither trained nor exported",
            ", ".join(map(str, extra)),
        )
