"""What a family of models tells the Megatron backend: how it is built, and how its weights travel.

Families are found in `registry`. Nothing here imports Megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from dovetail.backends.megatron.parts import MegatronModel

ReadParameter = Callable[[nn.Parameter], Tensor]
"""What is gathered of a parameter: the weight itself, or something of its shape such as its gradient."""


class MegatronFamily(ABC):
    """One architecture, or several that differ in details of their configuration."""

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
    def load_hf_weights(self, model: MegatronModel, folder: Path) -> None:
        """Fill this rank's part of every chunk from safetensors, tensor by tensor: no rank ever holds the whole model.

        A scalar head that the folder does not have starts as `dovetail.models.weights` starts it, from a fixed seed.
        Any other missing tensor is an error that names it.
        """

    @abstractmethod
    def named_weights(
        self, model: MegatronModel, read: ReadParameter, *, buffers: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the names and in the shapes of a Hugging Face checkpoint, one at a time, on every rank.

        Shards are gathered over tensor-, expert- and pipeline-parallel ranks; a tied weight comes once. `read` gives
        what is gathered of each parameter. `buffers`: also what is no parameter and stands in checkpoints (the bias
        of a sigmoid router), read as it is. All ranks must take all tensors.
        """
