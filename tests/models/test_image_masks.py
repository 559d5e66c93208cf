"""Models in which tokens attend to later ones: inside an image (Gemma 3), or everywhere in a prompt (PaliGemma)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from dovetail.backends.base import PLAIN_FORWARD
from dovetail.backends.network import network_call
from dovetail.models.errors import ModelError
from dovetail.models.policy import PolicyModel
from dovetail.protocol import DataProto

pytestmark = pytest.mark.unit

IMAGE, NUM_TOKENS = 60, 4
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def gemma() -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    ids = {"image_token_index": IMAGE, "boi_token_index": 61, "eoi_token_index": 62}
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=NUM_TOKENS, **ids)
    return Gemma3ForConditionalGeneration(config).eval()


def rows_with_an_image_and_without() -> tuple[DataProto, torch.Tensor]:
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    ids[0, 2 : 2 + NUM_TOKENS] = IMAGE
    mask[0, :1] = mask[1, :3] = 0
    pixels = torch.randn(1, 3, 8, 8)
    images = np.array([{"pixel_values": pixels}, {}], dtype=object)
    tensors = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, -4:]}
    return DataProto.from_dict(tensors, {"multi_modal_inputs": images}), pixels


@torch.no_grad()
def test_tokens_of_an_image_see_each_other_as_in_transformers() -> None:
    model, (batch, pixels) = gemma(), rows_with_an_image_and_without()
    policy = PolicyModel(model, use_remove_padding=False)
    log_probs = network_call(policy)(policy, batch, batch, PLAIN_FORWARD).log_probs
    assert log_probs is not None
    for row, image in enumerate(({"pixel_values": pixels}, {})):
        keep = batch.tensors["attention_mask"][row].bool()
        ids = batch.tensors["input_ids"][row][keep][None]
        logits = model(ids, **image, token_type_ids=(ids == IMAGE).long()).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(log_probs[row][keep][1:], expected, atol=1e-5, rtol=0)


def test_images_whose_tokens_see_each_other_are_not_packed() -> None:
    batch, _ = rows_with_an_image_and_without()
    policy = PolicyModel(gemma())
    with pytest.raises(ModelError, match=r"attend to later ones.*use_remove_padding=False"):
        network_call(policy)(policy, batch, batch, PLAIN_FORWARD)


def test_prompts_that_attend_to_later_tokens_are_refused() -> None:
    vision = VISION | {"model_type": "siglip_vision_model", "projection_dim": 32}
    config = PaliGemmaConfig(text_config=TEXT | {"model_type": "gemma"}, vision_config=vision, projection_dim=32)
    with torch.device("meta"):
        model = PaliGemmaForConditionalGeneration(config)
    for packs in (False, True):
        with pytest.raises(ModelError, match=r"PaliGemma.*use_bidirectional_attention"):
            PolicyModel(model, use_remove_padding=packs)
