"""Prompts with images as requests, and the rows made of the answers: engines differ in what they read, rows do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.base import GenerationRequest, GenerationResult
from dovetail.workers.generation import answers_of, requests_of

pytestmark = pytest.mark.unit

IMAGE = 9
WIDENED = [[0, 5, IMAGE, IMAGE, IMAGE, 6], [0, 0, 0, 0, 7, 8]]
RAW = [[5, IMAGE, 6], [7, 8]]
TENSORS: dict[str, Any] = {"pixel_values": torch.ones(12, 2), "image_grid_thw": torch.tensor([[1, 2, 6]])}
PICTURES: dict[str, Any] = {"image": ["picture"]}


def rollout(name: str) -> RolloutConfig:
    return RolloutConfig(name=name, prompt_length=6, response_length=3)  # pyrefly: ignore[bad-argument-type]


def prompts(settings: RolloutConfig) -> DataProto:
    ids = torch.tensor(WIDENED)
    media = {"multi_modal_inputs": TENSORS, "multi_modal_data": PICTURES}[settings.media_column]
    others = {"raw_prompt_ids": RAW, "sampling_seed": [1, 2], settings.media_column: [media, {}]}
    return DataProto.from_dict({"input_ids": ids, "attention_mask": (ids > 0).long()}, others, {"n": 2})


def written(requests: list[GenerationRequest]) -> list[GenerationResult]:
    answers = [[11, 12], [IMAGE], [13], [14, 15, 16]]
    named = [(request.request_id, sample) for request in requests for sample in range(2)]
    return [
        GenerationResult(name, sample, ids, [-1.0] * len(ids), "stop", [1] * len(ids))
        for (name, sample), ids in zip(named, answers, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "ids", "media"), [("native", [5, IMAGE, IMAGE, IMAGE, 6], TENSORS), ("vllm", RAW[0], PICTURES)]
)
def test_an_engine_gets_tensors_and_widened_ids_or_pictures_and_the_ids_as_written(
    name: str, ids: list[int], media: dict[str, Any]
) -> None:
    settings = rollout(name)
    with_image, text = requests_of(prompts(settings), settings, name="r")
    assert (with_image.prompt_token_ids, text.prompt_token_ids) == (ids, [7, 8])
    assert with_image.multi_modal is media
    assert text.multi_modal is None


@pytest.mark.parametrize("name", ["native", "vllm"])
def test_rows_hold_the_widened_prompt_whatever_the_engine_read(name: str) -> None:
    settings = rollout(name)
    asked = prompts(settings)
    requests = requests_of(asked, settings, name="r")
    rows = answers_of(asked, requests, written(requests), settings, pad_token_id=0).tensors
    assert rows["prompts"].tolist() == [WIDENED[0], WIDENED[0], WIDENED[1], WIDENED[1]]
    assert rows["input_ids"].tolist() == [
        [*WIDENED[0], 11, 12, 0],
        [*WIDENED[0], IMAGE, 0, 0],
        [*WIDENED[1], 13, 0, 0],
        [*WIDENED[1], 14, 15, 16],
    ]
    assert rows["attention_mask"].tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
    ]
    # One axis: which of three a token has beside an image, the trained model says itself.
    assert rows["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert rows["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]]


def test_an_engine_that_widened_a_prompt_otherwise_is_found_out() -> None:
    settings = rollout("vllm")
    asked = prompts(settings)
    requests = requests_of(asked, settings, name="r")
    results = [
        replace(result, num_prompt_tokens=5 if result.request_id == "r-0" else 2) for result in written(requests)
    ]
    assert len(answers_of(asked, requests, results, settings, pad_token_id=0)) == 4
    results[1] = replace(results[1], num_prompt_tokens=7)
    with pytest.raises(ValueError, match=r"made 7 tokens of the prompt of request 'r-0', and the model's processor 5"):
        answers_of(asked, requests, results, settings, pad_token_id=0)
