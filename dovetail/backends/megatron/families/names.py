"""Megatron's names of the weights that every decoder family has, and what reading and gathering ask of a family."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from dovetail.backends.megatron.families.shards import ShardLayout

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


class Layouts(Protocol):
    """Where the Hugging Face tensors of a weight are; `TableFamily` is one."""

    def layout(self, model: MegatronModel, name: str) -> ShardLayout:
        """Of the weight that is called `name` in the whole model: layers and experts numbered over all ranks."""
        ...

    def is_copy(self, model: MegatronModel, name: str) -> bool:
        """A head that is tied to the embedding of another stage: it has no tensor of its own."""
        ...
