"""What engines are sent: rows without columns they do not read, images in the form that the engine takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.data.errors import DataError
from dovetail.protocol import DataProto
from dovetail.trainer.requests import engine_request, join_answers

pytestmark = pytest.mark.unit

PICTURES: list[dict[str, Any]] = [{}, {"image": ["picture"]}]
TENSORS: list[dict[str, Any]] = [{}, {"pixel_values": torch.ones(4, 2)}]


def prompts(pictures: list[dict[str, Any]], tensors: list[dict[str, Any]] | None = None) -> DataProto:
    others = {"raw_prompt_ids": [[5, 6], [7]], "sampling_seed": [1, 2], "uid": ["a", "b"], "multi_modal_data": pictures}
    if tensors is not None:
        others["multi_modal_inputs"] = tensors
    ids = torch.tensor([[0, 5, 6], [7, 7, 7]])
    return DataProto.from_dict({"input_ids": ids, "attention_mask": (ids > 0).long(), "position_ids": ids}, others)


def test_text_is_sent_without_padding_and_with_its_seeds() -> None:
    request = engine_request(prompts([{}, {}], [{}, {}]), n=2, media_column="multi_modal_inputs", validate=True)
    assert sorted(request.columns) == ["raw_prompt_ids", "sampling_seed"]
    assert request.meta_info == {"n": 2, "validate": True}


@pytest.mark.parametrize("column", ["multi_modal_inputs", "multi_modal_data"])
def test_images_are_sent_in_one_form_with_the_widened_prompts(column: str) -> None:
    request = engine_request(prompts(PICTURES, TENSORS), n=2, media_column=column)
    assert sorted(request.columns) == sorted(["attention_mask", "input_ids", column, "raw_prompt_ids", "sampling_seed"])


@pytest.mark.parametrize("tensors", [None, [{}, {}]], ids=["no column", "an empty row"])
def test_pictures_that_the_model_would_not_see_are_refused(tensors: list[dict[str, Any]] | None) -> None:
    with pytest.raises(DataError, match=r"prompt 1 of a batch has image .* data.return_multi_modal_inputs=True"):
        engine_request(prompts(PICTURES, tensors), n=2, media_column="multi_modal_data")


def test_answers_share_the_tensors_of_their_prompt_and_leave_the_pictures() -> None:
    written = DataProto.from_dict({"input_ids": torch.ones(4, 5, dtype=torch.int64)}, meta_info={"temperature": 1.0})
    joined = join_answers(prompts(PICTURES, TENSORS), written, n=2)
    rows = joined.non_tensor_batch["multi_modal_inputs"]
    assert [bool(row) for row in rows] == [False, False, True, True]
    assert rows[2]["pixel_values"] is rows[3]["pixel_values"]
    assert "multi_modal_data" not in joined
    assert joined.tensors["input_ids"].shape == (4, 5)
