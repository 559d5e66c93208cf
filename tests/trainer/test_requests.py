"""What engines are sent: rows without columns they do not read; images are refused, not dropped."""

from __future__ import annotations

import pytest
import torch

from dovetail.data.errors import DataError
from dovetail.protocol import DataProto
from dovetail.trainer.requests import engine_request

pytestmark = pytest.mark.unit


def prompts(media: list[dict]) -> DataProto:
    others = {"raw_prompt_ids": [[5, 6], [7]], "sampling_seed": [1, 2], "multi_modal_data": media}
    return DataProto.from_dict({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, others)


def test_a_batch_with_images_is_refused() -> None:
    with pytest.raises(DataError, match="prompts with images"):
        engine_request(prompts([{}, {"image": ["picture"]}]), n=2)


def test_text_is_sent_without_padding_and_with_its_seeds() -> None:
    request = engine_request(prompts([{}, {}]), n=2, validate=True)
    assert sorted(request.columns) == ["raw_prompt_ids", "sampling_seed"]
    assert request.meta_info == {"n": 2, "validate": True}
