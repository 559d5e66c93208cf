"""Statistics of rows that share a prompt. Rows of a group need not be adjacent; no loop runs over rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dovetail.algorithms.masked import at_least_float32

GroupIds = np.ndarray | Sequence[object] | torch.Tensor
"""One id per row, of any hashable type; rows with equal ids form a group."""


class Groups:
    """Group number of every row, and sums over groups.

    Sums are float64 and statistics are rounded to the scores' precision only at the end: a group of equal rewards
    then has its own value as mean and a spread of exactly 0, where float32 sums would leave a rounding error for the
    division by the spread to blow up.
    """

    def __init__(self, uid: GroupIds, like: torch.Tensor) -> None:
        """`like` holds one value per row; group numbers go to its device."""
        numbers = _group_numbers(uid)
        if len(numbers) != like.shape[0]:
            raise ValueError(f"uid has {len(numbers)} ids for {like.shape[0]} rows; give exactly one id per row.")
        self.number = torch.from_numpy(numbers).to(like.device)
        self._num_groups = int(numbers.max()) + 1 if numbers.size else 0
        self.size = torch.bincount(self.number, minlength=self._num_groups)
        self.row_size = self.size[self.number]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """One float64 sum per group."""
        zeros = torch.zeros(self._num_groups, dtype=torch.float64, device=values.device)
        return zeros.index_add_(0, self.number, values.double())

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """`[groups, width]` float64: the rows of each group added up."""
        zeros = torch.zeros(self._num_groups, values.shape[1], dtype=torch.float64, device=values.device)
        return zeros.index_add_(0, self.number, values.double())

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """For every row the mean of its group; 0 for a group of one, which has nothing to compare itself with."""
        mean = (self.sum(values) / self.size).to(values.dtype)
        return torch.where(self.row_size > 1, mean[self.number], 0.0)

    def row_std(self, values: torch.Tensor) -> torch.Tensor:
        """For every row the sample standard deviation of its group; 1 for a group of one."""
        squares = (values.double() - (self.sum(values) / self.size)[self.number]).square()
        std = (self.sum(squares) / (self.size - 1).clamp(min=1)).sqrt().to(values.dtype)
        return torch.where(self.row_size > 1, std[self.number], 1.0)

    def rank(self, values: torch.Tensor) -> torch.Tensor:
        """Rows ordered by group, best value first within a group (ties in row order)."""
        by_value = torch.argsort(values, descending=True, stable=True)
        return by_value[torch.argsort(self.number[by_value], stable=True)]


def outcome_scores(token_level_rewards: torch.Tensor) -> torch.Tensor:
    """One score per row, the sum of its token rewards, in at least float32. Refuses rewards that are not finite.

    One NaN would spread to every row of its group, or through whitening to the whole batch, as a silent poison.
    """
    scores = at_least_float32(token_level_rewards).sum(dim=-1)
    check_finite_rows(scores)
    return scores


def check_finite_rows(scores: torch.Tensor) -> None:
    finite = torch.isfinite(scores)
    if not finite.all():
        rows = torch.nonzero(~finite).flatten().tolist()
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"token_level_rewards of row {shown} is not finite (first sum: {scores[rows[0]].item()}); "
            "fix the reward function, or drop the row before advantages are computed."
        )


def spread_over_tokens(row_advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Give every kept token the advantage of its row."""
    column = row_advantages.unsqueeze(-1)
    out = _empty(response_mask.shape, row_advantages)
    if response_mask.dtype == row_advantages.dtype:
        return torch.mul(column, response_mask, out=out)
    # Multiplying by an integer mask would first convert it, which costs more than the product.
    return torch.where(response_mask.bool(), column, row_advantages.new_zeros(()), out=out)


def _empty(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory. On the CPU from numpy, which asks for huge pages: half of the time of writing 128 MiB
    into fresh memory goes into page faults."""
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.empty(shape, dtype=np.float64 if like.dtype == torch.float64 else np.float32))


def _group_numbers(uid: GroupIds) -> np.ndarray:
    """Number the ids in order of first appearance. By hash, not by order: ids may be of mixed types."""
    ids: list[object] = uid.tolist() if isinstance(uid, torch.Tensor | np.ndarray) else list(uid)
    number_of = {distinct: number for number, distinct in enumerate(dict.fromkeys(ids))}
    return np.fromiter(map(number_of.__getitem__, ids), dtype=np.int64, count=len(ids))
