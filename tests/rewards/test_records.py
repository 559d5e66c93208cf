"""A scored batch as rows that a person can read."""

from __future__ import annotations

import pytest
import torch

from dovetail.protocol import DataProto
from dovetail.rewards.columns import answer_records, dump_records
from tests.models.tiny import tiny_tokenizer
from tests.rewards.test_runner import WIDTH, answers

pytestmark = pytest.mark.unit


def test_a_record_has_text_truth_score_advantage_and_gap() -> None:
    batch = answers("good", "no")
    mask = batch.tensors["response_mask"].float()
    scores = torch.zeros(2, WIDTH)
    scores[0, 3] = 1.0
    columns = {
        "token_level_scores": scores,
        "reward_failed": torch.tensor([False, True]),
        "advantages": 0.5 * mask,
        "old_log_probs": -1.0 * mask,
        "rollout_log_probs": -1.25 * mask,
    }
    batch = batch.union(
        DataProto.from_dict(columns, {"acc": [1.0, None], "pred": ["good", ""], "tensor": [mask, mask]})
    )
    first, second = answer_records(batch, tiny_tokenizer())
    assert first["response"] == "good"
    assert (first["ground_truth"], first["data_source"], first["response_length"]) == ("good", "toy", 4)
    assert (first["score"], first["reward_failed"], second["reward_failed"]) == (1.0, False, True)
    assert (first["advantage"], first["logprob_gap"]) == (0.5, 0.25)
    assert (first["acc"], second["acc"], first["pred"]) == (1.0, None, "good")
    assert "tensor" not in first
    assert "extra_info" not in first


def test_columns_that_are_not_there_yet_are_left_out() -> None:
    record = answer_records(answers("good"), tiny_tokenizer())[0]
    assert record["response"] == "good"
    assert "advantage" not in record
    assert "score" not in record


def test_a_dump_has_the_names_that_tools_of_verl_read_and_what_the_reward_gave() -> None:
    batch = answers("good", "no")
    scores = torch.zeros(2, WIDTH)
    scores[0, 3] = 0.75
    columns = {"token_level_scores": scores, "reward_failed": torch.tensor([False, True])}
    batch = batch.union(DataProto.from_dict(columns, {"acc": [1.0, None], "pred": ["good", ""]}))
    first, second = dump_records(batch, tiny_tokenizer(), ["good", "no"], step=7)
    assert list(first) == ["input", "output", "gts", "score", "step", "acc", "pred"]
    assert (first["output"], first["gts"], first["score"], first["step"]) == ("good", "good", 0.75, 7)
    assert (first["acc"], first["pred"]) == (1.0, "good")
    assert second["score"] is None, "a failure is no score of 0"


def test_prompts_of_a_dump_have_no_special_tokens() -> None:
    batch = answers("good")
    tokenizer = tiny_tokenizer()
    batch.tensors["prompts"][0, 0] = tokenizer.eos_token_id
    batch = batch.union(
        DataProto.from_dict({"token_level_scores": torch.zeros(1, WIDTH), "reward_failed": torch.tensor([False])})
    )
    (record,), (dumped,) = answer_records(batch, tokenizer), dump_records(batch, tokenizer, ["good"], step=1)
    assert tokenizer.eos_token in record["prompt"]
    assert tokenizer.eos_token not in dumped["input"]
