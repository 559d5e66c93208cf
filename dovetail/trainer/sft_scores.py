"""Score the samples of fine-tuning's validation: with the reward function, and in the numbers, of RL's validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.config.root import DovetailConfig
from dovetail.data.files import UNNAMED_SOURCE
from dovetail.protocol import DataProto
from dovetail.rewards.runner import RewardRunner
from dovetail.trainer.validation import scored_rows

_NOT_OWN = ("data_source", "reward_model", "extra_info")
_SCORES = ("data_source", "ground_truth", "values", "pred", "failed")


def with_scores(
    rows: Sequence[dict[str, Any]],
    responses: DataProto,
    file_rows: Sequence[Mapping[str, Any]],
    rewards: RewardRunner,
    config: DovetailConfig,
) -> list[dict[str, Any]]:
    """`rows` with what the reward function says of their `responses`. `file_rows` are those that they were made of.

    The truth is `reward_model.ground_truth` of the file's row; without one, what the assistant wrote there.
    """
    key = config.data.reward_fn_key
    columns = {
        "uid": [row["uid"] for row in rows],
        key: [str(row.get(key) or UNNAMED_SOURCE) for row in file_rows],
        "reward_model": [
            row.get("reward_model") or {"ground_truth": own["ground_truth"]}
            for own, row in zip(rows, file_rows, strict=True)
        ],
        "extra_info": [
            {"prompt": row.get(config.data.prompt_key)}
            | {name: value for name, value in row.items() if name not in _NOT_OWN}
            | (row.get("extra_info") or {})
            for row in file_rows
        ],
    }
    batch = DataProto.from_dict(responses.tensors, {**responses.non_tensor_batch, **columns})
    result = rewards.score(batch, shaped=False)
    others = {**batch.non_tensor_batch, **result.columns.non_tensor_batch}
    scored = scored_rows(DataProto.from_dict({**batch.tensors, **result.columns.tensors}, others), result, key)
    return [{**row, **{name: own[name] for name in _SCORES}} for row, own in zip(rows, scored, strict=True)]
