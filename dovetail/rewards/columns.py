"""Scores of rows as columns of a batch, as metrics, and as plain rows for files. Writes no file.

A row without a score is marked, never scored 0 in silence.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.protocol import COLUMNS, DataProto
from dovetail.protocol.trajectories import row_totals
from dovetail.rewards.answers import Decoder, decode_prompts, decode_responses, response_attention
from dovetail.rewards.decoding import TEXT
from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.managers import Outcome

FAILED = "reward_failed"
"""Bool tensor `[rows]`: the row has no score; its tokens must not be trained on."""


def place_scores(scores: Sequence[float], last_token: torch.Tensor, width: int) -> torch.Tensor:
    """`[rows, width]` of zeros with each row's score on its last token."""
    placed = torch.zeros(len(scores), width, dtype=torch.float32)
    return placed.scatter_(1, last_token.cpu().unsqueeze(1), torch.tensor(scores, dtype=torch.float32).unsqueeze(1))


def outcome_columns(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """Every further column the functions returned. Numbers with NaN, other things with None where a row has none."""
    names = dict.fromkeys(name for outcome in outcomes if not isinstance(outcome, Failure) for name in outcome)
    clash = [name for name in names if name in COLUMNS or name in (FAILED, "index")]
    if clash:
        raise RewardError(
            f"the reward function returned {', '.join(clash)}, which other stages write; use other names."
        )
    return {name: _column([_entry(outcome, name) for outcome in outcomes]) for name in names}


def reward_metrics(outcomes: Sequence[Outcome], columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`reward/failed`, its share, and the mean of every numeric column over the rows that have it."""
    failed = sum(isinstance(outcome, Failure) for outcome in outcomes)
    metrics = {"reward/failed": float(failed), "reward/failed_share": failed / max(len(outcomes), 1)}
    for name, column in columns.items():
        if column.dtype != object and not np.isnan(column).all():
            metrics[f"reward/{name}/mean"] = float(np.nanmean(column))
    return metrics


def add_model_scores(
    outcomes: Sequence[Outcome], rm_scores: torch.Tensor, *, rule_weight: float, rm_weight: float
) -> list[Outcome]:
    """Weighted sum of rule and reward model per row; a model score that is not finite fails the row."""
    combined: list[Outcome] = []
    for outcome, model_score in zip(outcomes, rm_scores.sum(dim=-1).tolist(), strict=True):
        if isinstance(outcome, Failure):
            combined.append(outcome)
        elif not math.isfinite(model_score):
            combined.append(Failure("bad_value", f"the reward model's score (rm_scores) is {model_score}."))
        else:
            score = rule_weight * outcome["score"] + rm_weight * model_score
            combined.append({**outcome, "score": score, "rm_score": model_score})
    return combined


def check_failures(outcomes: Sequence[Outcome], max_failed_share: float) -> None:
    """Raise with the first reason when more than the allowed share of rows has no score."""
    failures = {row: outcome for row, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
    if len(failures) > max_failed_share * len(outcomes):
        raise RewardError(failure_message(failures, len(outcomes), max_failed_share))


def failure_message(failures: Mapping[int, Failure], num_rows: int, max_failed_share: float, given_up: str = "") -> str:
    """`given_up` says why not all rows were tried."""
    row, first = next(iter(failures.items()))
    kinds = Counter(failure.kind for failure in failures.values())
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (
        f"{len(failures)} of {num_rows} responses could not be scored ({counted}{given_up}); at most "
        f"{max_failed_share:.0%} may fail (reward_model.max_failed_share). The first, row {row}:\n"
        f"{first.detail}"
    )


def score_batch(scores: torch.Tensor, outcomes: Sequence[Outcome], columns: Mapping[str, Any]) -> DataProto:
    failed = torch.tensor([isinstance(outcome, Failure) for outcome in outcomes], dtype=torch.bool)
    return DataProto.from_dict({"token_level_scores": scores, FAILED: failed}, columns)


def with_scores(batch: DataProto, scores: DataProto) -> DataProto:
    """The batch with what scoring gave. A data file's own column of such a name (`score`, `acc`) is found in
    `extra_info` alone."""
    columns = batch.non_tensor_batch
    batch.non_tensor_batch = {name: columns[name] for name in columns if name not in scores.non_tensor_batch}
    return batch.union(scores)


def _entry(outcome: Outcome, name: str) -> Any:
    return None if isinstance(outcome, Failure) else outcome.get(name)


def _column(entries: Sequence[Any]) -> np.ndarray:
    if all(entry is None or isinstance(entry, (bool, int, float)) for entry in entries):
        with contextlib.suppress(OverflowError):  # a whole number of more than 308 digits, which an answer may hold
            return np.array([math.nan if entry is None else float(entry) for entry in entries], dtype=np.float64)
    column = np.empty(len(entries), dtype=object)
    column[:] = entries
    return column


_DUMPED = ("input", "output", "gts", "score", "step")


def answer_records(batch: DataProto, tokenizer: Decoder) -> list[dict[str, Any]]:
    """One dict per row. Columns that are not there yet (advantages, log-probs) are left out.

    `logprob_gap` is the mean absolute difference between engine and trainer over the sampled tokens, `advantage` the
    mean over them. What scoring processes have decoded is not decoded again.
    """
    columns: dict[str, Sequence[Any]] = {
        "prompt": decode_prompts(batch, tokenizer),
        "response": _texts(batch, tokenizer),
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
    scores = row_totals(batch, "token_level_scores").tolist()
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
        columns["score"] = row_totals(batch, "token_level_scores").tolist()
    if FAILED in tensors:
        columns[FAILED] = tensors[FAILED].tolist()
    if "advantages" in tensors:
        columns["advantage"] = _row_means(tensors["advantages"], mask)
    if "old_log_probs" in tensors and "rollout_log_probs" in tensors:
        gaps = _row_means((tensors["old_log_probs"] - tensors["rollout_log_probs"]).abs(), mask)
        columns["logprob_gap"] = [None if math.isnan(gap) else gap for gap in gaps]  # not known before the update
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
