"""A scored batch as plain rows, for files: what was asked, answered, earned. Writes no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dovetail.protocol import COLUMNS, DataProto
from dovetail.rewards.answers import Decoder, decode_prompts, decode_responses, response_attention
from dovetail.rewards.columns import FAILED
from dovetail.rewards.decoding import TEXT

_DUMPED = ("input", "output", "gts", "score", "step")


def answer_records(
    batch: DataProto, tokenizer: Decoder, solution_strs: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """One dict per row. Columns that are not there yet (advantages, log-probs) are left out.

    `logprob_gap` is the mean absolute difference between engine and trainer over the sampled tokens, `advantage` the
    mean over them. `solution_strs` saves a second decoding (`RewardResult.solution_strs`), as does what scoring
    processes have decoded.
    """
    responses = list(solution_strs) if solution_strs is not None else _texts(batch, tokenizer)
    columns: dict[str, Sequence[Any]] = {
        "prompt": decode_prompts(batch, tokenizer),
        "response": responses,
        "response_length": response_attention(batch).sum(-1).tolist(),
        **_from_dataset(batch),
        **_from_tensors(batch),
        **_from_reward(batch),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def dump_records(batch: DataProto, tokenizer: Decoder, solution_strs: Sequence[str], step: int) -> list[dict[str, Any]]:
    """One dict per row with the names verl's dumps have: input, output, gts, score, step, and what the reward gave.

    Prompts are without special tokens. A row that could not be scored has the score None.
    """
    failed = batch.tensors[FAILED].tolist()
    scores = batch.tensors["token_level_scores"].sum(-1).tolist()
    columns: dict[str, Sequence[Any]] = _from_reward(batch) | {
        "input": decode_prompts(batch, tokenizer, skip_special_tokens=True),
        "output": solution_strs,
        "gts": _from_dataset(batch).get("ground_truth", [None] * len(batch)),
        "score": [None if fails else score for fails, score in zip(failed, scores, strict=True)],
        "step": [step] * len(batch),
    }
    names = dict.fromkeys([*_DUMPED, *columns])
    return [dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)]


def _texts(batch: DataProto, tokenizer: Decoder) -> list[str]:
    column = batch.non_tensor_batch.get(TEXT)
    if column is None:
        return decode_responses(batch, tokenizer)
    texts = column.tolist()
    missing = [row for row, text in enumerate(texts) if text is None]
    for row, text in zip(missing, decode_responses(batch.select_idxs(missing), tokenizer), strict=True):
        texts[row] = text
    return texts


def _from_dataset(batch: DataProto) -> dict[str, Sequence[Any]]:
    columns: dict[str, Sequence[Any]] = {}
    for name in ("uid", "data_source", "index"):
        if name in batch.non_tensor_batch:
            columns[name] = batch.non_tensor_batch[name].tolist()
    if "reward_model" in batch.non_tensor_batch:
        truths = batch.non_tensor_batch["reward_model"]
        columns["ground_truth"] = [truth.get("ground_truth") if isinstance(truth, dict) else truth for truth in truths]
    return columns


def _from_tensors(batch: DataProto) -> dict[str, Sequence[Any]]:
    tensors, columns = batch.tensors, {}
    mask = tensors["response_mask"].float()
    if "token_level_scores" in tensors:
        columns["score"] = tensors["token_level_scores"].sum(-1).tolist()
    if FAILED in tensors:
        columns[FAILED] = tensors[FAILED].tolist()
    if "advantages" in tensors:
        columns["advantage"] = _row_means(tensors["advantages"], mask)
    if "old_log_probs" in tensors and "rollout_log_probs" in tensors:
        columns["logprob_gap"] = _row_means((tensors["old_log_probs"] - tensors["rollout_log_probs"]).abs(), mask)
    return columns


def _from_reward(batch: DataProto) -> dict[str, Sequence[Any]]:
    """What the reward function returned beside the score: numbers and texts that no other stage writes."""
    known = {*COLUMNS, "index", "score", "ability", "full_prompts"}
    return {
        name: column.tolist()
        for name, column in batch.non_tensor_batch.items()
        if name not in known and isinstance(column, np.ndarray) and all(_is_plain(entry) for entry in column.tolist())
    }


def _row_means(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return ((values.float() * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
