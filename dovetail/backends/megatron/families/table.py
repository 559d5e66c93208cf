"""A family as a table: Megatron's name of each weight, and the layout of the Hugging Face tensors it is made of.

Reading files, gathering shards and naming them are here, once; a family adds its configuration and its table.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dovetail.backends.megatron.families.base import MegatronFamily, ReadParameter
from dovetail.backends.megatron.families.gather import gather_weights
from dovetail.backends.megatron.families.load import load_chunks
from dovetail.backends.megatron.families.names import EMBEDDING, EXPERT, FINAL_NORM, HEAD, HEAD_BIAS
from dovetail.backends.megatron.families.shards import ShardLayout, Vocabulary, Whole

if TYPE_CHECKING:
    from dovetail.backends.megatron.parts import MegatronModel

Table = Mapping[str, ShardLayout]
"""Megatron's name inside a layer -> Hugging Face names inside the same layer."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class TableFamily(MegatronFamily):
    """What all decoder families share: names of the ends, `model.layers.N.`, experts by number."""

    @abstractmethod
    def layer_table(self, hf_config: Any, layer: int) -> Table:
        """The weights of layer `layer`. Experts stand once, as `mlp.experts.linear_fc1.weight`, with `{expert}` in
        their Hugging Face names."""

    def layout(self, model: MegatronModel, name: str) -> ShardLayout:
        config = model.hf_config
        match = _LAYER.fullmatch(name)
        if match is None:
            return self._end(model, name)
        layer, inner = int(match[1]), match[2]
        expert = EXPERT.fullmatch(inner)
        table = self.layer_table(config, layer)
        key = expert[1] if expert else inner
        if key not in table:
            raise ValueError(
                f"{type(self).__name__} has no entry for {name}: the built model has a part this family does not know "
                "(a field of override_transformer_config adds it?)."
            )
        return table[key].under(f"model.layers.{layer}.", expert=int(expert[2]) if expert else None)

    def is_copy(self, model: MegatronModel, name: str) -> bool:
        return name == HEAD and model.role == "policy" and bool(model.hf_config.tie_word_embeddings)

    def load_hf_weights(self, model: MegatronModel, folder: Path) -> None:
        load_chunks(self, model, folder)

    def named_weights(
        self, model: MegatronModel, read: ReadParameter, *, buffers: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return gather_weights(self, model, read, buffers=buffers)

    def _end(self, model: MegatronModel, name: str) -> ShardLayout:
        size = model.hf_config.vocab_size
        if name == EMBEDDING:
            return Vocabulary(("model.embed_tokens.weight",), size)
        if name == FINAL_NORM:
            return Whole(("model.norm.weight",))
        if name == HEAD and model.role == "policy":
            tied = self.is_copy(model, name)
            return Vocabulary(("model.embed_tokens.weight" if tied else "lm_head.weight",), size)
        if name in (HEAD, HEAD_BIAS):
            return Whole((name.replace("output_layer", "score"),))
        raise ValueError(f"{type(self).__name__} has no entry for {name}.")
