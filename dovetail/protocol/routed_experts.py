"""Routed experts: which experts of a mixture each token of a row was sent to, in every layer that has a router.

A row has one array `[tokens, layers, k]` for its prompt and response, without padding: the experts of token t when the
model read it. The last tokens may be missing, as the last one that an engine sampled is: no log-prob depends on them.
Knows no engine and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ROUTED_EXPERTS = "routed_experts"
"""The column: an array for each row."""


def expert_dtype(num_experts: int) -> torch.dtype:
    """The narrowest dtype for ids of experts, whose largest number is left to say `not_recorded`."""
    return torch.uint8 if num_experts <= torch.iinfo(torch.uint8).max else torch.int16


def not_recorded(dtype: torch.dtype) -> int:
    """In place of the ids where nothing was recorded: there the router chooses for itself."""
    return torch.iinfo(dtype).max


def at_places(recorded: Sequence[np.ndarray], places: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`[num_tokens, layers, k]`: the experts of a micro-batch's rows in the order in which layers see its tokens.

    `places`, `[rows, seq_len]`, says where each token of the padded batch stands there, -1 for padding. Of several
    rows that share a token the first one's experts are taken.
    """
    dtype = torch.from_numpy(recorded[0]).dtype
    row = np.full((num_tokens, *recorded[0].shape[1:]), not_recorded(dtype), recorded[0].dtype)
    for experts, of_row in zip(reversed(recorded), places.flip(0), strict=True):
        real = of_row[of_row >= 0][: len(experts)].numpy()
        row[real] = experts[: len(real)]
    return torch.from_numpy(row)


def by_row(padded: torch.Tensor, attention_mask: torch.Tensor) -> np.ndarray:
    """The column, of experts in the padded layout `[rows, seq_len, layers, k]`."""
    column = np.empty(len(padded), dtype=object)
    for number, (experts, mask) in enumerate(zip(padded, attention_mask.bool(), strict=True)):
        column[number] = experts[mask].numpy()
    return column
