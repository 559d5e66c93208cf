"""Scores of agents' trajectories: what is known without a reward function, and where rewards go in their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import UNGRADED, Trajectories
from dovetail.rewards.decoding import TEXT
from dovetail.rewards.errors import Failure, FailureKind
from dovetail.rewards.managers import Outcome


def known_outcomes(batch: DataProto) -> dict[int, Outcome]:
    """By row: the score that the agent, its environment or its endpoint gave, or why there is none."""
    columns = batch.non_tensor_batch
    if "outcome" not in columns:
        return {}
    known: dict[int, Outcome] = {}
    rewards = columns.get("agent_reward", [math.nan] * len(batch))
    for row, (ended, reward) in enumerate(zip(columns["outcome"], rewards, strict=True)):
        if ended in UNGRADED:
            known[row] = Failure(cast(FailureKind, str(ended)), _error(columns, row))
        elif reward is not None and not math.isnan(reward):
            known[row] = {"score": float(reward)}
    return known


def add_turn_rewards(scores: torch.Tensor, batch: DataProto, failed: torch.Tensor) -> torch.Tensor:
    """Scores with the rewards of single turns at their positions. Rows without a score get none."""
    column = batch.non_tensor_batch.get("turn_rewards")
    if column is None:
        return scores
    for row, rewards in enumerate(column):
        for position, reward in () if failed[row] else rewards:
            scores[row, int(position)] += float(reward)
    return scores


def on_rows(columns: DataProto, trajectories: Trajectories | None) -> DataProto:
    """Columns of trajectories as columns of their rows: the score is on the last one, everything else on each."""
    if trajectories is None:
        return columns
    rows = columns.select_idxs(trajectories.number)
    earlier = torch.ones(len(rows), dtype=torch.bool)
    earlier[trajectories.last] = False
    rows.tensors["token_level_scores"][earlier] = 0.0
    if TEXT in rows.non_tensor_batch:
        rows.non_tensor_batch[TEXT][earlier.numpy()] = None
    return rows


def shared(futures: Sequence[Any], trajectories: Trajectories | None) -> list[Any]:
    """One entry per trajectory as one per row."""
    return list(futures) if trajectories is None else [futures[number] for number in trajectories.number.tolist()]


def _error(columns: Mapping[str, Any], row: int) -> str:
    events = columns["events"][row] if "events" in columns else ()
    errors = [str(event.get("result") or event.get("failure")) for event in events or () if event["kind"] == "error"]
    return errors[-1] if errors else "the trajectory broke off; its events say no more."
