"""What a family of models tells the Megatron backend: its configuration, and a table of its weights.

The table maps Megatron's name of each weight to the layout of the Hugging Face tensors it is made of. Reading files,
gathering shards and naming them are here, once, for all families. Families are found in `registry`. Nothing here
imports Megatron.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from dovetail.backends.megatron.families.gather import ReadParameter, gather_weights
from dovetail.backends.megatron.families.load import load_chunks
from dovetail.backends.megatron.families.local_weights import EMBEDDING, EXPERT, FINAL_NORM, HEAD, HEAD_BIAS
from dovetail.backends.megatron.families.shards import ShardLayout, Vocabulary, Whole

if TYPE_CHECKING:
    from dovetail.backends.megatron.parts import MegatronModel

Table = Mapping[str, ShardLayout]
"""Megatron's name inside a layer -> Hugging Face names inside the same layer."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class MegatronFamily(ABC):
    """One architecture, or several that differ in details of their configuration.

    All share the names of the ends, `model.layers.N.`, and experts by number.
    """

    model_types: ClassVar[tuple[str, ...]]
    """`hf_config.model_type` of the models it builds."""
    uses_mla: ClassVar[bool] = False
    """Whether the configuration is an `MLATransformerConfig` (multi-head latent attention)."""

    @abstractmethod
    def transformer_config(self, hf_config: Any) -> dict[str, Any]:
        """Fields of `TransformerConfig` that follow from the architecture: sizes, norms, activation, experts.

        Parallel sizes, dtypes, fusions and recompute are the backend's; `override_transformer_config` is laid over all.
        """

    @abstractmethod
    def gpt_model(self, hf_config: Any) -> dict[str, Any]:
        """Arguments of `GPTModel`: `vocab_size` (not padded), `max_sequence_length`, `position_embedding_type`,
        `rotary_base`, `rotary_percent`, `rope_scaling`, `rope_scaling_factor`, `seq_len_interpolation_factor`,
        `share_embeddings_and_output_weights`. Those that are left out keep Megatron's default."""

    def finish(self, chunk: nn.Module, hf_config: Any) -> None:
        """Called on every chunk once it is built, for what no argument of `GPTModel` says (rotary frequencies that
        Megatron computes differently from transformers)."""
        return None

    @abstractmethod
    def layer_table(self, hf_config: Any, layer: int) -> Table:
        """The weights of layer `layer`. Experts stand once, as `mlp.experts.linear_fc1.weight`, with `{expert}` in
        their Hugging Face names."""

    def layout(self, model: MegatronModel, name: str) -> ShardLayout:
        """Of the weight that is called `name` in the whole model: layers and experts numbered over all ranks."""
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
        """A head that is tied to the embedding of another stage: it has no tensor of its own."""
        return name == HEAD and model.role == "policy" and bool(model.hf_config.tie_word_embeddings)

    def load_hf_weights(self, model: MegatronModel, folder: Path) -> None:
        """Fill this rank's part of every chunk from safetensors, tensor by tensor: no rank ever holds the whole model.

        A scalar head that the folder does not have starts as `dovetail.models.weights` starts it, from a fixed seed.
        Any other missing tensor is an error that names it.
        """
        load_chunks(self, model, folder)

    def named_weights(
        self, model: MegatronModel, read: ReadParameter, *, buffers: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the names and in the shapes of a Hugging Face checkpoint, one at a time, on every rank.

        Shards are gathered over tensor-, expert- and pipeline-parallel ranks; a tied weight comes once. `read` gives
        what is gathered of each parameter. `buffers`: also what is no parameter and stands in checkpoints (the bias
        of a sigmoid router), read as it is. All ranks must take all tensors.
        """
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
