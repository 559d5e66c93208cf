"""Placeholders of images that stand for none: a model may write one, a text may hold one. float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dovetail.backends.base import ForwardOptions
from dovetail.backends.network import network_call
from dovetail.models.policy import PolicyModel
from dovetail.protocol import DataProto
from tests.models.tiny import IMAGE_TOKEN, VISION_END, VISION_START, tiny_model

pytestmark = pytest.mark.unit

GRID = torch.tensor([[1, 4, 4]])
PROMPTS = [
    [5, VISION_START, *[IMAGE_TOKEN] * 4, VISION_END, 6, 7],
    [8, IMAGE_TOKEN, 9],  # text that names the token
]
ANSWERS = [[20, IMAGE_TOKEN, IMAGE_TOKEN, 21], [22, 23, IMAGE_TOKEN, 24]]


def images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "image_grid_thw": GRID}


def batch() -> DataProto:
    """Prompts left-padded, answers of four tokens, one position per token as rollouts write them."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * (len(p) + 4) for p in PROMPTS])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "responses": ids[:, -4:]}
    return DataProto.from_dict(tensors, {"multi_modal_inputs": np.array([images(), {}], dtype=object)})


@torch.no_grad()
def decoded(model: Any, prompt: list[int], answer: list[int], media: dict[str, Any]) -> torch.Tensor:
    """Log-probs as an engine has them: the answer's tokens go in one by one, after the prompt and its images."""
    ids = torch.tensor([prompt])
    extra = {**media, "mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if media else {}
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **extra)
    position = int(
        model.model.get_rope_index(ids, extra["mm_token_type_ids"], GRID)[0].max() if media else ids.size(1) - 1
    )
    found = []
    for token in answer:
        position += 1
        found.append(output.logits[0, -1].log_softmax(-1)[token])
        output = model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.full((3, 1, 1), position),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    return torch.stack(found)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_written_placeholder_is_read_as_the_engine_read_it(packed: bool) -> None:
    reference = tiny_model("qwen2_5_vl")
    policy = PolicyModel(tiny_model("qwen2_5_vl"), use_remove_padding=packed)
    with torch.no_grad():
        found = network_call(policy)(policy, batch(), batch(), ForwardOptions(last_tokens=4)).log_probs
    assert found is not None
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        wanted = decoded(reference, prompt, answer, images() if row == 0 else {})
        assert (found[row, -4:] - wanted).abs().max() < 1e-5


def test_embeddings_of_written_placeholders_get_gradients() -> None:
    policy = PolicyModel(tiny_model("qwen2_5_vl", tie_word_embeddings=False))
    found = network_call(policy)(policy, batch(), batch(), ForwardOptions(last_tokens=1)).log_probs
    assert found is not None
    found.sum().backward()
    gradient = policy.hf_model.get_input_embeddings().weight.grad
    assert gradient is not None
    assert gradient[IMAGE_TOKEN].abs().max() > 0


def test_a_model_of_text_alone_refuses_images() -> None:
    policy = PolicyModel(tiny_model("qwen2"))
    with pytest.raises(
        ValueError, match=r"images \(pixel_values, image_grid_thw\), and model_type=qwen2 reads token ids"
    ):
        network_call(policy)(policy, batch(), batch(), ForwardOptions())
