"""Prompts with images on the native engine, against transformers' own generation, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config

from dovetail.models.load import build_meta_model
from dovetail.rollout import GenerationRequest, SamplingParams, UnsupportedPromptError
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.native.images import check_images
from tests.models.tiny import IMAGE_TOKEN, image_batch, save_tiny_model, tiny_model

pytestmark = pytest.mark.unit

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen2_5_vl")


def prompts() -> list[tuple[list[int], dict[str, torch.Tensor] | None]]:
    """Ids and images: one of 4x4 patches, none, one of 4x8, and both in one prompt."""
    found = image_batch()
    rows = [row[mask.bool()].tolist() for row, mask in zip(found["input_ids"], found["attention_mask"], strict=True)]
    pixels, grid = found["multi_modal_inputs"]["pixel_values"], found["multi_modal_inputs"]["image_grid_thw"]
    first = {"pixel_values": pixels[:16], "image_grid_thw": grid[:1]}
    second = {"pixel_values": pixels[16:], "image_grid_thw": grid[1:]}
    both = {"pixel_values": pixels, "image_grid_thw": grid}
    return [(rows[0], first), (rows[1], None), (rows[2], second), (rows[0] + rows[2], both)]


def requests(sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(str(n), ids, sampling, images) for n, (ids, images) in enumerate(prompts())]


def greedy(model: Any, ids: list[int], images: dict[str, torch.Tensor] | None, count: int) -> list[int]:
    extra: dict[str, Any] = dict(images or {})
    if images is not None:
        extra["mm_token_type_ids"] = (torch.tensor([ids]) == IMAGE_TOKEN).int()
    written = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        **extra,
    )
    return written[0, len(ids) :].tolist()


def log_probs(model: Any, ids: list[int], images: dict[str, torch.Tensor] | None, answer: list[int]) -> torch.Tensor:
    """By a plain forward over prompt and answer."""
    whole = torch.tensor([ids + answer])
    extra: dict[str, Any] = dict(images or {})
    if images is not None:
        extra["mm_token_type_ids"] = (whole == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), **extra).logits
    scores = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    return scores.gather(-1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("max_prefill_tokens", [8192, 20, 4], ids=["together", "in turn", "larger than a step"])
def test_greedy_tokens_equal_those_of_transformers_in_a_batch_with_text(model: Any, max_prefill_tokens: int) -> None:
    with NativeEngine(model, max_prefill_tokens=max_prefill_tokens) as engine:
        results = engine.generate(requests(GREEDY))
    assert [result.token_ids for result in results] == [greedy(model, *prompt, 12) for prompt in prompts()]


def test_samples_share_a_prompt_with_images_and_their_log_probs_are_the_models(model: Any) -> None:
    sampling = SamplingParams(max_new_tokens=10, n=3, seed=4, ignore_eos=True)
    with NativeEngine(model, max_num_seqs=4) as engine:
        results = engine.generate(requests(sampling))
        prefilled = engine.stats.prefill_tokens
    assert prefilled < 3 * sum(len(ids) for ids, _ in prompts())
    assert len({tuple(result.token_ids) for result in results}) > 4
    for result in results:
        wanted = log_probs(model, *prompts()[int(result.request_id)], result.token_ids)
        assert (wanted - torch.tensor(result.log_probs)).abs().max() < 1e-4


def test_images_matter(model: Any) -> None:
    ids, images = prompts()[0]
    assert images is not None
    other = images | {"pixel_values": -images["pixel_values"]}
    with NativeEngine(model) as engine:
        asked = [GenerationRequest("a", ids, GREEDY, images), GenerationRequest("b", ids, GREEDY, other)]
        one, two = engine.generate(asked)
    assert one.log_probs != two.log_probs


def test_an_engine_of_a_folder_takes_updates_of_tower_and_text(model: Any, tmp_path: Path) -> None:
    new = tiny_model("qwen2_5_vl", seed=3)
    with NativeEngine(save_tiny_model("qwen2_5_vl", tmp_path)) as engine:
        before = engine.generate(requests(GREEDY))
        engine.update_weights(new.named_parameters(), 1)
        after = engine.generate(requests(GREEDY))
    assert [result.token_ids for result in before] == [greedy(model, *prompt, 12) for prompt in prompts()]
    assert [result.token_ids for result in after] == [greedy(new, *prompt, 12) for prompt in prompts()]
    assert {v for result in after for v in result.weight_versions} == {1}


def test_a_prompt_is_prefilled_again_with_its_images_when_caches_are_forgotten(model: Any) -> None:
    with NativeEngine(model) as engine:
        samples = [sample for request in requests(GREEDY) for sample in engine._samples_of(request)]
        engine._batch.add(samples)
        for _ in range(6):
            engine._step()
        assert all(0 < len(sample.log_probs) < 12 for sample in samples)
        engine.update_weights(None, 2)
        while any(sample.finish_reason is None for sample in samples):
            engine._step()
    for sample, prompt in zip(samples, prompts(), strict=True):
        assert sample.sequence[sample.num_prompt :] == greedy(model, *prompt, 12)
        assert set(sample.versions) == {0, 2}


def test_what_cannot_be_placed_is_refused_by_name(model: Any) -> None:
    ids, images = prompts()[0]
    cut = [token for n, token in enumerate(ids) if n != ids.index(IMAGE_TOKEN)]
    with NativeEngine(model) as engine:
        with pytest.raises(UnsupportedPromptError, match=r"'a' carries image; .*tensors of the model's processor"):
            engine.generate([GenerationRequest("a", ids, GREEDY, {"image": [object()]})])
        with pytest.raises(ValueError, match="'b' has 3 image tokens and images of 4 features"):
            engine.generate([GenerationRequest("b", cut, GREEDY, images)])


def test_images_whose_tokens_see_each_other_are_refused() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = build_meta_model(Gemma3Config(text_config=text, vision_config=vision))
    with pytest.raises(UnsupportedPromptError, match="'a' carries pixel_values; the tokens of an image see each other"):
        check_images(gemma, GenerationRequest("a", [5], GREEDY, {"pixel_values": torch.zeros(1, 3, 8, 8)}))
