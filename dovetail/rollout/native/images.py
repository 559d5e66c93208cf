"""Images in prompts: which are placed in a prefill, and at which positions. Takes what a processor made, no pictures.

A prompt's placeholders are already as many as its images have features (`input_ids` of the processor), and
`GenerationRequest.multi_modal` holds the processor's other tensors (`pixel_values`, `image_grid_thw`, ...). The model
itself places the features and says which positions tokens have; no architecture is known here by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dovetail.models.backbone import concat_multi_modal_inputs
from dovetail.models.multimodal import image_mask_keyword, multimodal_position_ids
from dovetail.rollout.base import GenerationRequest, UnsupportedPromptError
from dovetail.rollout.native.attention import Segment
from dovetail.rollout.native.scheduler import Sample


def check_images(model: PreTrainedModel, request: GenerationRequest) -> None:
    """UnsupportedPromptError for what this model cannot be given; ValueError where tokens and images do not match."""
    media = request.multi_modal or {}
    name = f"request {request.request_id!r} carries {', '.join(media)}"
    if image_mask_keyword(model) is not None:
        raise UnsupportedPromptError(
            f"{name}; the tokens of an image see each other in model_type={model.config.model_type}, and the native "
            "engine computes causal attention only. Use rollout.name=vllm."
        )
    if not hasattr(model.base_model, "get_image_features"):
        raise UnsupportedPromptError(f"{name}; model_type={model.config.model_type} reads token ids only.")
    if not any(key.startswith("pixel_values") for key in media) or not all(map(torch.is_tensor, media.values())):
        raise UnsupportedPromptError(
            f"{name}; the native engine takes the tensors of the model's processor (pixel_values, image_grid_thw, ...) "
            "and its input_ids, with all placeholders. Use rollout.name=vllm for pictures."
        )
    token = getattr(model.config, "image_token_id", None)
    merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None)
    if token is None or merge is None or "image_grid_thw" not in media:
        return
    wanted = int(media["image_grid_thw"].prod(-1).sum()) // merge**2
    num_tokens = list(request.prompt_token_ids).count(token)
    if num_tokens != wanted:
        raise ValueError(
            f"request {request.request_id!r} has {num_tokens} image tokens and images of {wanted} features; give the "
            "input_ids of the processor, uncut."
        )


@torch.inference_mode()
def prompt_positions(model: PreTrainedModel, request: GenerationRequest) -> Tensor | None:
    """`[3, T]` (time, height, width) of a prompt with images; None where a token's position is its place."""
    if not request.multi_modal:
        return None
    ids = torch.tensor([list(request.prompt_token_ids)])
    positions = multimodal_position_ids(model, ids, torch.ones_like(ids), request.multi_modal)
    return None if positions is None else positions[0].cpu()


def prefill_images(plan: Sequence[tuple[Sample, Segment]], device: torch.device) -> dict[str, Tensor]:
    """The tensors of all images in these segments, in the order of their tokens. A prompt with images is never cut."""
    rows = [row.request.multi_modal for row, segment in plan if row.request.multi_modal and segment.start == 0]
    return {name: tensor.to(device) for name, tensor in concat_multi_modal_inputs(rows).items()}


def prefill_positions(plan: Sequence[tuple[Sample, Segment]], device: torch.device) -> Tensor:
    """`[1, T]` of the segments' tokens, end to end; `[3, 1, T]` as soon as one has an image."""
    placed = any(row.positions is not None for row, _ in plan)
    parts = [row.positions_of(segment.start, segment.end, num_axes=3 if placed else 1) for row, segment in plan]
    whole = torch.cat(parts, dim=1).to(device)
    return whole.unsqueeze(1) if placed else whole
