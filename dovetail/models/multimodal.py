"""What models that mix images and text need beside their tensors: position ids, a blank image for rows of text, and
placeholders that stand for no image.

Asks the model itself; knows no architecture by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOKEN_TYPES = "mm_token_type_ids"
"""The name that processors give to `token_types`."""


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
    types = multi_modal_inputs.get(TOKEN_TYPES)
    if types is None:
        types = token_types(hf_model.config, input_ids)
    positions, _ = base.get_rope_index(
        input_ids=input_ids, mm_token_type_ids=types, attention_mask=attention_mask, **grids
    )
    return positions.transpose(0, 1)


def token_types(config: Any, input_ids: Tensor) -> Tensor:
    """0 text, 1 image, 2 video, as processors write them."""
    types = torch.zeros_like(input_ids, dtype=torch.int)
    for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
        token = getattr(config, name, None)
        if token is not None:
            types[input_ids == token] = kind
    return types


def prompt_token_types(
    config: Any, input_ids: Tensor, rows: Sequence[Mapping[str, Tensor]], *, num_written: int
) -> Tensor:
    """`token_types` of rows whose last `num_written` columns the model wrote: images are in prompts that came with any.

    A placeholder elsewhere is a token like others: a model may write one, and a user's text may hold one.
    """
    types = token_types(config, input_ids)
    types[:, types.size(1) - num_written :] = 0
    types[[not row for row in rows]] = 0
    return types


def image_mask_keyword(hf_model: Any) -> str | None:
    """The keyword by which a model is given `token_types` for its mask: in Gemma 3 and 4 the tokens of an image see
    each other, also later ones. None for models with causal attention throughout."""
    if getattr(hf_model.config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        return TOKEN_TYPES
    is_multimodal = hasattr(hf_model.config, "vision_config")
    takes_types = "token_type_ids" in inspect.signature(hf_model.base_model.forward).parameters
    return "token_type_ids" if is_multimodal and takes_types else None


def as_text(hf_model: Any, input_ids: Tensor, is_text: Tensor) -> Tensor:
    """The ids with placeholders that are text below 0, where models that count placeholders do not see them."""
    stray = is_text & (token_types(hf_model.config, input_ids) > 0)
    return torch.where(stray, -1 - input_ids, input_ids)


@contextmanager
def embeds_as_text(hf_model: Any) -> Iterator[None]:
    """Inside, the model embeds ids of `as_text` as the tokens they are, as an engine that wrote them did."""

    def put_back(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (torch.where(args[0] < 0, -1 - args[0], args[0]),)

    handle = hf_model.get_input_embeddings().register_forward_pre_hook(put_back)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def vision_tower_runs(hf_model: Any) -> Iterator[None]:
    """Inside, a call without images runs the vision tower on a blank image and adds 0 times its features.

    A sharded tower gathers its weights and reduces its gradients together with all ranks: one whose rows hold no image
    would leave the others waiting. It runs where an image would, between the embedding and the first layer, so that
    ranks meet in the same order. Models whose blank image is not known here are left as they are.
    """
    base = hf_model.base_model
    image = _blank_image(hf_model)
    if image is None:
        yield
        return

    def add_nothing(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        output = base.get_image_features(**image, return_dict=True)
        features = torch.cat(list(output.pooler_output))
        kwargs["inputs_embeds"] = kwargs["inputs_embeds"] + 0.0 * features.sum().to(kwargs["inputs_embeds"].dtype)
        return args, kwargs

    handle = base.get_decoder().register_forward_pre_hook(add_nothing, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _blank_image(hf_model: Any) -> dict[str, Tensor] | None:
    """The smallest image: one merged patch, in the form of the models that take patches and a grid."""
    vision = getattr(hf_model.config, "vision_config", None)
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    sizes = [int(size) for size in (getattr(vision, name, None) for name in names) if size is not None]
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None)
    if not hasattr(hf_model.base_model, "get_image_features") or channels is None or len(sizes) < len(names):
        return None
    patch, frames, merge = sizes
    parameter = next(hf_model.parameters())
    pixels = torch.zeros(merge * merge, channels * frames * patch * patch, device=parameter.device)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, merge, merge]], device=parameter.device)}
