"""Position ids for models that mix images and text. Asks the model itself; knows no architecture by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def multimodal_position_ids(
    hf_model: Any, input_ids: Tensor, attention_mask: Tensor, multi_modal_inputs: Mapping[str, Tensor]
) -> Tensor | None:
    """`[B, 3, T]` for models with temporal, height and width positions when the batch has images; otherwise `None`.

    Must see the padded batch: positions are computed row by row, before packing.
    """
    base = hf_model.base_model
    if not hasattr(base, "get_rope_index") or not multi_modal_inputs:
        return None
    grids = {
        name: multi_modal_inputs[name]
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if name in multi_modal_inputs
    }
    if not grids:
        return None
    types = multi_modal_inputs.get("mm_token_type_ids")
    if types is None:
        types = token_types(hf_model.config, input_ids)
    positions, _ = base.get_rope_index(
        input_ids=input_ids, mm_token_type_ids=types, attention_mask=attention_mask, **grids
    )
    return positions.transpose(0, 1)


def token_types(config: Any, input_ids: Tensor) -> Tensor:
    """0 text, 1 image, 2 video, as processors write `mm_token_type_ids`."""
    types = torch.zeros_like(input_ids, dtype=torch.int)
    for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
        token = getattr(config, name, None)
        if token is not None:
            types[input_ids == token] = kind
    return types
