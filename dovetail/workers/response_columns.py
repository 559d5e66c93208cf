"""What roles take from a batch, and the response part of what models return. Knows nothing of losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.protocol.sampling_mask import SAMPLING_MASK

_NARROW = (torch.int8, torch.int32)
_OF_ROWS = ("multi_modal_inputs", SAMPLING_MASK, ROUTED_EXPERTS)
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")


def take_columns(data: DataProto, names: Sequence[str]) -> DataProto:
    """The named columns, and what else of a row models read, where there is any. A missing column is an error that
    names it.

    Token ids and masks travel in narrow integers; models, losses and users' code get int64.
    """
    missing = [name for name in names if name not in data]
    if missing:
        raise ValueError(f"the batch has no column {', '.join(missing)}; it has {', '.join(sorted(data.columns))}.")
    others = [name for name in (*_OF_ROWS, *names) if name in data.non_tensor_batch]
    tensors = [name for name in names if name in data.tensors]
    taken = data.select(batch_keys=tensors, non_tensor_batch_keys=list(dict.fromkeys(others)))
    wide = {name: column.long() if column.dtype in _NARROW else column for name, column in taken.tensors.items()}
    return DataProto.from_dict(wide, taken.non_tensor_batch, taken.meta_info)


def sampling_temperature(data: DataProto) -> float:
    """The temperature the responses were sampled with: log-probs are taken under it."""
    if "temperature" not in data.meta_info:
        raise ValueError(
            "meta_info has no 'temperature'; log-probs are taken under the sampling temperature, so set "
            "data.meta_info['temperature'] to the one the responses were sampled with."
        )
    temperature = float(data.meta_info["temperature"])
    # Greedy answers have no distribution to speak of; engines report their log-probs under temperature 1.
    return temperature if temperature > 0 else 1.0


def response_width(data: DataProto) -> int:
    return data.tensors["responses"].shape[1]


def at_responses(tokens: Tensor | None, width: int) -> Tensor:
    """The results about the response tokens: log-probs, entropies, values of the state each was written in."""
    assert tokens is not None, "the backend returns what its model computes and the options ask for"
    return tokens[:, -width:]
