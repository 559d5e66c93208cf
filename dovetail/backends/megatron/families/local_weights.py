"""The weights that this process holds, under Megatron's names in the whole model, and who shares each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from dovetail.backends.megatron.parts import MegatronModel

EMBEDDING, HEAD, FINAL_NORM = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
)
HEAD_BIAS = "output_layer.bias"
EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.weight)(\d+)$")
"""A weight of one expert; the number is the expert's."""

_LAYER_PREFIX = re.compile(r"decoder\.layers\.(\d+)\.")
# Megatron counts tokens per expert in buffers of its own; this is the only one that a checkpoint holds.
_SAVED_BUFFER = "mlp.router.expert_bias"


@dataclass(frozen=True)
class LocalWeight:
    """`name` has the layer's number in the whole model; an expert still has its number on this rank."""

    name: str
    tensor: Tensor
    is_buffer: bool = False


def local_weights(model: MegatronModel, *, buffers: bool = True) -> Iterator[LocalWeight]:
    """Every weight of every chunk, in the order of the modules."""
    for chunk in model.chunks:
        decoder: Any = chunk.decoder
        numbers = {index: layer.layer_number - 1 for index, layer in enumerate(decoder.layers)}
        for name, parameter in chunk.named_parameters():
            yield LocalWeight(_in_whole_model(name, numbers), parameter)
        for name, buffer in chunk.named_buffers() if buffers else ():
            if name.endswith(_SAVED_BUFFER):
                yield LocalWeight(_in_whole_model(name, numbers), buffer, is_buffer=True)


def is_expert(name: str) -> bool:
    return EXPERT.search(name) is not None


def experts_per_rank(model: MegatronModel) -> int:
    return (model.config.num_moe_experts or 0) // model.layout.ep_size


def with_expert_of(name: str, ep_rank: int, per_rank: int) -> str:
    """The name of an expert's weight in the whole model, from its name on the rank `ep_rank`."""
    match = EXPERT.search(name)
    return name if match is None else f"{name[: match.start(2)]}{ep_rank * per_rank + int(match[2])}"


def shared_by(model: MegatronModel, name: str) -> tuple[list[dist.ProcessGroup], int, int]:
    """The groups over which a cut weight is gathered (inner first), this rank's part of it and the number of parts."""
    layout = model.layout
    if is_expert(name):
        return [layout.etp_group, layout.ep_group], layout.etp_rank, layout.etp_size
    return [layout.tp_group], layout.tp_rank, layout.tp_size


def _in_whole_model(name: str, numbers: dict[int, int]) -> str:
    match = _LAYER_PREFIX.match(name)
    return name if match is None else f"decoder.layers.{numbers[int(match[1])]}.{name[match.end() :]}"
