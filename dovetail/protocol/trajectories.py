"""Rows that belong to one trajectory: its segments, and how it ended. Knows no agent and no reward.

An agent's trajectory whose history was rewritten is several rows of its group (`uid`), with its number in the group
(`trajectory`) and theirs in it (`segment`). Batches without these columns have one row for each trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dovetail.protocol.columns import RESPONSE_COLUMNS, SEQUENCE_COLUMNS
from dovetail.protocol.dataproto import DataProto

UNGRADED = frozenset({"tool_error", "infra", "aborted"})
"""Outcomes that say nothing of the policy (`dovetail.agents.types` has them all): masked and counted, never scored."""


@dataclass(frozen=True)
class Trajectories:
    """`rows[i]` are the rows of trajectory i, in the order of their segments."""

    rows: Sequence[Sequence[int]]

    @cached_property
    def last(self) -> list[int]:
        """The row of each trajectory's last segment."""
        return [rows[-1] for rows in self.rows]

    @cached_property
    def number(self) -> torch.Tensor:
        """The trajectory of each row."""
        number = torch.empty(sum(map(len, self.rows)), dtype=torch.int64)
        for trajectory, rows in enumerate(self.rows):
            number[list(rows)] = trajectory
        return number

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """One sum per trajectory of one value per row."""
        return values.new_zeros(len(self.rows)).index_add_(0, self.number, values)

    def join(self, batch: DataProto) -> DataProto:
        """One row per trajectory: columns about responses hold the segments after each other, padding included; of
        the other columns, the last segment's. Prompts are left out."""
        others = batch.select_idxs(self.last)
        width = batch.tensors["responses"].shape[1]
        tensors = {}
        for name, column in others.tensors.items():
            if name in RESPONSE_COLUMNS:
                tensors[name] = self._side_by_side(batch.tensors[name], width, -1 if name == "weight_version" else 0)
            elif name not in SEQUENCE_COLUMNS and name != "prompts":
                tensors[name] = column
        return DataProto.from_dict(tensors, others.non_tensor_batch, others.meta_info)

    def split(self, column: torch.Tensor) -> torch.Tensor:
        """A column of `join`'s batch as one of the rows."""
        parts = column.view(len(self.rows), -1, column.shape[1] // max(map(len, self.rows)))
        out = column.new_empty(len(self.number), parts.shape[-1])
        for trajectory, rows in enumerate(self.rows):
            out[list(rows)] = parts[trajectory, : len(rows)]
        return out

    def _side_by_side(self, column: torch.Tensor, width: int, fill: int) -> torch.Tensor:
        out = column.new_full((len(self.rows), max(map(len, self.rows)), width), fill)
        for trajectory, rows in enumerate(self.rows):
            out[trajectory, : len(rows)] = column[list(rows)]
        return out.view(len(self.rows), -1)


def trajectories_of(batch: DataProto) -> Trajectories | None:
    """Which rows belong together; None where every row is a trajectory."""
    others = batch.non_tensor_batch
    if "trajectory" not in others:
        return None
    rows: dict[tuple[str, int], list[int]] = {}
    for row, (uid, number) in enumerate(zip(others["uid"], others["trajectory"], strict=True)):
        rows.setdefault((str(uid), int(number)), []).append(row)
    if len(rows) == len(batch):
        return None
    segment = others["segment"]
    return Trajectories([sorted(members, key=lambda row: int(segment[row])) for members in rows.values()])


def one_row_each(batch: DataProto) -> DataProto:
    """The last row of each trajectory, with the scores of all its rows (`token_level_scores`) on its last token."""
    trajectories = trajectories_of(batch)
    if trajectories is None:
        return batch
    rows = batch.select_idxs(trajectories.last)
    if "token_level_scores" in rows:
        total = trajectories.sum(batch.tensors["token_level_scores"].sum(dim=1))
        scores = torch.zeros_like(rows.tensors["token_level_scores"])
        scores[:, -1] = total
        return DataProto.from_dict(
            {**rows.tensors, "token_level_scores": scores}, rows.non_tensor_batch, rows.meta_info
        )
    return rows


def row_totals(batch: DataProto, column: str) -> torch.Tensor:
    """For each row the sum of a column over its tokens, and over those of the other rows of its trajectory."""
    sums = batch.tensors[column].sum(dim=1)
    trajectories = trajectories_of(batch)
    return sums if trajectories is None else trajectories.sum(sums)[trajectories.number]


def turn_numbers(batch: DataProto) -> torch.Tensor:
    """`[rows, response_len]`: the turn in which the policy sampled a token, from 0, over all segments of a trajectory;
    observed tokens belong to the turn before them (0 at the start)."""
    sampled = batch.tensors["weight_version"] >= 0
    begins = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    number = begins.long().cumsum(dim=1)
    trajectories = trajectories_of(batch)
    if trajectories is not None:
        turns = begins.sum(dim=1)
        for rows in trajectories.rows:
            earlier = 0
            for row in rows:
                number[row] += earlier
                earlier += int(turns[row])
    return (number - 1).clamp(min=0)
