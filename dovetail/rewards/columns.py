"""Scores of rows as columns of a batch, and as metrics. A row without a score is marked, never scored 0 in silence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.protocol import COLUMNS, DataProto
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
    clash = [name for name in names if name in COLUMNS or name == FAILED]
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
        f"{len(failures)} of {num_rows} answers could not be scored ({counted}{given_up}); at most "
        f"{max_failed_share:.0%} may fail (reward_model.max_failed_share). The first, row {row}:\n"
        f"{first.detail}"
    )


def score_batch(scores: torch.Tensor, outcomes: Sequence[Outcome], columns: Mapping[str, Any]) -> DataProto:
    failed = torch.tensor([isinstance(outcome, Failure) for outcome in outcomes], dtype=torch.bool)
    return DataProto.from_dict({"token_level_scores": scores, FAILED: failed}, columns)


def _entry(outcome: Outcome, name: str) -> Any:
    return None if isinstance(outcome, Failure) else outcome.get(name)


def _column(entries: Sequence[Any]) -> np.ndarray:
    if all(entry is None or isinstance(entry, (bool, int, float)) for entry in entries):
        return np.array([math.nan if entry is None else float(entry) for entry in entries], dtype=np.float64)
    column = np.empty(len(entries), dtype=object)
    column[:] = entries
    return column
