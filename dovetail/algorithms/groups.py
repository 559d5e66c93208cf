"""Statistics of rows that share a prompt. Rows of a group need not be adjacent; no loop runs over rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

GroupIds = np.ndarray | Sequence[object] | torch.Tensor
"""One id per row, of any hashable type; rows with equal ids form a group."""


class Groups:
    """Group number of every row, and sums over groups.

    Statistics are float64: a group of equal rewards then has a spread of exactly 0, where float32 would leave a
    rounding error for the division by the spread to blow up.
    """

    def __init__(self, uid: GroupIds, like: torch.Tensor) -> None:
        """`like` holds one value per row; group numbers go to its device."""
        numbers = _group_numbers(uid)
        if numbers.shape != (like.shape[0],):
            raise ValueError(f"uid has shape {numbers.shape} for {like.shape[0]} rows; give exactly one id per row.")
        self.number = torch.from_numpy(numbers).to(like.device)
        self._num_groups = int(numbers.max()) + 1 if numbers.size else 0
        self.size = torch.bincount(self.number, minlength=self._num_groups)
        self.row_size = self.size[self.number]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """One float64 sum per group."""
        zeros = torch.zeros(self._num_groups, dtype=torch.float64, device=values.device)
        return zeros.index_add_(0, self.number, values.double())

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """For every row the mean of its group; 0 for a group of one, which has nothing to compare itself with."""
        return torch.where(self.row_size > 1, (self.sum(values) / self.size)[self.number], 0.0)

    def row_std(self, values: torch.Tensor) -> torch.Tensor:
        """For every row the sample standard deviation of its group; 1 for a group of one."""
        squares = (values.double() - self.row_mean(values)).square()
        std = (self.sum(squares) / (self.size - 1).clamp(min=1)).sqrt()
        return torch.where(self.row_size > 1, std[self.number], 1.0)

    def rank(self, values: torch.Tensor) -> torch.Tensor:
        """Rows ordered by group, best value first within a group (ties in row order)."""
        by_value = torch.argsort(values, descending=True, stable=True)
        return by_value[torch.argsort(self.number[by_value], stable=True)]


def outcome_scores(token_level_rewards: torch.Tensor) -> torch.Tensor:
    """One float64 score per row: the sum of its token rewards. Refuses rewards that are not finite.

    One NaN would spread to every row of its group, or through whitening to the whole batch, as a silent poison.
    """
    scores = token_level_rewards.sum(dim=-1).double()
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


def spread_over_tokens(scores: torch.Tensor, token_level_rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give every kept token of a row the row's score, in the precision of the rewards (at least float32)."""
    dtype = torch.promote_types(token_level_rewards.dtype, torch.float32)
    return scores.to(dtype).unsqueeze(-1) * mask


def _group_numbers(uid: GroupIds) -> np.ndarray:
    ids = uid.detach().cpu().numpy() if isinstance(uid, torch.Tensor) else np.asarray(uid)
    try:
        return np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    except TypeError:  # ids of mixed types have no order; their hashes do as well
        seen: dict[object, int] = {}
        return np.array([seen.setdefault(i, len(seen)) for i in ids.tolist()], dtype=np.int64)
