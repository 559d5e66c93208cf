"""Validation: every prompt keeps its name and its seed, and the majority votes on what the reward function read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader
from dovetail.data.sampler import PromptSampler
from dovetail.protocol import DataProto
from dovetail.rewards.answers import Answer
from dovetail.rewards.runner import RewardResult
from dovetail.trainer.validation import Validation, validate

pytestmark = pytest.mark.unit


class Numbers:
    """Row number i is a prompt of the source `even` or `odd`."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        facts = {"data_source": ("even", "odd")[index % 2], "reward_model": {"ground_truth": index}}
        return {"input_ids": torch.tensor([index]), "raw_prompt": str(index), **facts}


def answer(prompts: DataProto, *, n: int, **_: Any) -> DataProto:
    batch = prompts.repeat(n, interleave=True)
    mask = torch.ones(len(batch), 2, dtype=torch.long)
    mask[0, 1] = 0
    batch.batch["response_mask"] = mask
    reasons = ["stop", *["length"] * (len(batch) - 1)]
    return batch.union(DataProto.from_dict(non_tensors={"finish_reason": np.array(reasons, dtype=object)}))


def validated(loader: PromptLoader, scores: dict[str, list[Any]], n: int = 1) -> Validation:
    """Each prompt has the same scores, and whatever else `scores` names, for its `n` responses."""

    def score(batch: DataProto) -> RewardResult:
        times = len(batch) // n
        tokens = torch.zeros(len(batch), 2)
        tokens[:, 1] = torch.tensor(scores["score"] * times)
        columns = {name: np.array(values * times) for name, values in scores.items()}
        tensors = {"token_level_scores": tokens, "reward_failed": torch.zeros(len(batch), dtype=torch.bool)}
        answers = [Answer("", None, {}, np.zeros(1), None, "text") for _ in range(len(batch))]  # type: ignore[arg-type]
        return RewardResult(DataProto.from_dict(tensors, columns), {}, {}, answers)

    config = DovetailConfig.model_validate({"actor_rollout_ref": {"rollout": {"val_kwargs": {"n": n}}}})
    return validate(config, loader, answer, score)


def test_a_prompt_keeps_its_name_however_validation_is_shuffled() -> None:
    loader = PromptLoader(Numbers(), PromptSampler([6], batch_size=4, shuffle=True, drop_last=False))
    runs = [validated(loader, {"score": [1.0]}).rows for _ in range(3)]
    assert len({tuple(row["prompt"] for row in rows) for rows in runs}) > 1
    assert all({row["prompt"]: row["uid"] for row in rows} == {str(i): f"val-{i}" for i in range(6)} for rows in runs)


@pytest.mark.parametrize("preds", [["a", None, "a"], [5.0, float("nan"), 5.0]])
def test_one_response_without_an_answer_does_not_end_the_vote(preds: list[Any]) -> None:
    loader = PromptLoader(Numbers(), PromptSampler([6], batch_size=6, shuffle=False, drop_last=False))
    metrics = validated(loader, {"score": [0.0, 1.0, 0.0], "pred": preds}, n=3).metrics
    assert metrics["val-core/even/reward/maj@3"] == 0.0


def test_there_is_no_vote_where_the_reward_function_read_no_answer() -> None:
    loader = PromptLoader(Numbers(), PromptSampler([6], batch_size=6, shuffle=False, drop_last=False))
    metrics = validated(loader, {"score": [0.0, 1.0], "pred": [float("nan")] * 2}, n=2).metrics
    assert not [name for name in metrics if "/maj@" in name]


def test_lengths_and_the_share_that_was_cut_off_are_beside_the_scores() -> None:
    loader = PromptLoader(Numbers(), PromptSampler([6], batch_size=6, shuffle=False, drop_last=False))
    validation = validated(loader, {"score": [1.0]})
    lengths = {
        name.rpartition("/")[2]: value for name, value in validation.metrics.items() if "response_length" in name
    }
    assert lengths == pytest.approx({"mean": 11 / 6, "max": 2.0, "min": 1.0, "clip_ratio": 5 / 6})
    assert [row["truncated"] for row in validation.rows] == [False, *[True] * 5]
