"""Batches are as wide as their longest response: joined, they become equal; sent, they hold what is read."""

from __future__ import annotations

import pytest
import torch

from dovetail.protocol import COLUMNS, DataProto, SchemaError, stage_columns
from dovetail.protocol.columns import RESPONSE_COLUMNS, SEQUENCE_COLUMNS
from dovetail.protocol.schema import RESPONSE, SEQUENCE
from dovetail.rollout.assemble import Response, assemble

pytestmark = pytest.mark.unit

PAD = 7


def generated(*lengths: int, prompt: tuple[int, ...] = (11, 12)) -> DataProto:
    """Answers of these lengths to one prompt."""
    responses = [
        Response(tuple(range(20, 20 + n)), (True,) * n, tuple(-0.5 for _ in range(n)), (3,) * n, "stop")
        for n in lengths
    ]
    return assemble([list(prompt)] * len(lengths), responses, pad_token_id=PAD, prompt_length=3)


def test_the_columns_that_are_widened_are_those_of_the_schema() -> None:
    by_shape = {
        shape: {spec.name for spec in COLUMNS.values() if shape in spec.shapes} for shape in (RESPONSE, SEQUENCE)
    }
    assert by_shape[RESPONSE] == RESPONSE_COLUMNS
    assert by_shape[SEQUENCE] == SEQUENCE_COLUMNS


def test_answers_of_two_generations_join_to_what_one_generation_of_all_would_be() -> None:
    short, long = generated(1, 2), generated(4, 3)
    assert short.tensors["responses"].shape == (2, 2)
    joined = DataProto.concat([short, long])
    assert joined.equals(generated(1, 2, 4, 3))
    assert DataProto.concat([long, short]).equals(generated(4, 3, 1, 2))


def test_a_batch_of_empty_answers_keeps_one_column() -> None:
    batch = generated(0, 0)
    assert batch.tensors["responses"].tolist() == [[PAD], [PAD]]
    assert batch.tensors["attention_mask"].tolist() == [[0, 1, 1, 0]] * 2


def test_ids_and_masks_are_narrow() -> None:
    tensors = generated(2, 1).tensors
    assert {tensors[name].dtype for name in ("responses", "input_ids", "position_ids", "prompts")} == {torch.int32}
    assert {tensors[name].dtype for name in ("attention_mask", "response_mask")} == {torch.int8}


def test_a_column_that_nobody_declared_is_not_padded_in_silence() -> None:
    parts = [generated(1).union(DataProto.from_dict({"mine": torch.ones(1, width)})) for width in (1, 2)]
    with pytest.raises(ValueError, match="'mine' has rows of"):
        DataProto.concat(parts)


def update_batch() -> DataProto:
    batch = generated(2, 1)
    batch.union(DataProto.from_dict({"advantages": torch.zeros(2, 2), "weights": torch.ones(2)}, {"uid": ["a", "b"]}))
    return batch


def test_a_stage_gets_the_columns_it_reads_and_those_a_loss_asks_for() -> None:
    usual = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask", "advantages"]
    sent = stage_columns(update_batch(), "update_actor")
    assert set(sent.columns) == {*usual, "rollout_log_probs"}
    assert sent.meta_info == update_batch().meta_info
    asked = stage_columns(update_batch(), "update_actor", ["weights", "uid"])
    assert set(asked.columns) - set(sent.columns) == {"weights", "uid"}


def test_a_column_that_is_missing_fails_by_name() -> None:
    batch = update_batch()
    with pytest.raises(SchemaError, match=r"before stage 'update_actor': the batch has no 'weihgts'.*'weights'"):
        stage_columns(batch, "update_actor", ["weihgts"])
    batch.pop(["advantages"])
    with pytest.raises(SchemaError, match="before stage 'update_actor': column 'advantages' is missing"):
        stage_columns(batch, "update_actor")
