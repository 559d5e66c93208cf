"""What a role's Megatron model consists of, as the modules beside this one pass it around. No behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dovetail.backends.megatron.layout import MegatronLayout
from dovetail.models.load import Role


@dataclass(frozen=True)
class MegatronModel:
    """One network, cut into the chunks that this process holds."""

    chunks: Sequence[nn.Module]
    """The bare `GPTModel`s: one, or one for each virtual pipeline stage. Parameters have Transformer Engine's names
    (`decoder.layers.0.self_attention.linear_qkv.layer_norm_weight`), numbered from 0 in every chunk; the number in the
    whole model is `layer.layer_number - 1`."""
    wrapped: Sequence[nn.Module]
    """The same, as they are called: inside `Float16Module` in half precision, inside `DistributedDataParallel` when
    trained."""
    config: Any
    """Megatron's `TransformerConfig` (`MLATransformerConfig`), shared by all chunks."""
    hf_config: Any
    role: Role
    """`policy` has a vocabulary head (`output_layer.weight`, split over tensor-parallel ranks, or none where it is tied
    to an embedding on the same stage). `value` and `reward` have `output_layer.weight` of shape `[1, hidden]` and for
    `value` `output_layer.bias`, whole on every tensor-parallel rank of the last stage."""
    layout: MegatronLayout


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Megatron cuts the vocabulary into equal parts. The rows added here are zero and are cut off on export."""
    return -(-vocab_size // tp_size) * tp_size
