"""Turn a matrix of token losses into this shard's share of the mini-batch loss.

A mini-batch is cut into micro-batches and spread over data-parallel ranks. Every divisor here is a count over the
WHOLE mini-batch, so shares add up to the value of the uncut batch and gradients do not depend on the cut. Whoever
averages gradients over ranks (FSDP, DDP) must multiply the share by the number of ranks first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dovetail.algorithms.masked import masked_sum

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class BatchCounts:
    """Counts of a whole mini-batch over all data-parallel ranks. Counts of its parts add up with `+` and `sum`."""

    num_tokens: int = 0  # response tokens the mask keeps
    num_sequences: int = 0  # trajectories that keep at least one token; each row is one unless rows have weights
    num_rows: int = 0  # all rows, also those whose mask is empty
    response_width: int = 0  # padded response width before any trimming: the widest part's
    row_weights: torch.Tensor | None = field(default=None, compare=False)
    """Of the rows at hand, not of the mini-batch: the share of its trajectory's kept tokens that each row holds. None:
    every row is a trajectory."""

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            num_rows=self.num_rows + other.num_rows,
            response_width=max(self.response_width, other.response_width),
        )

    def __radd__(self, other: int) -> BatchCounts:
        return self  # lets sum() start from its default 0


def count_batch(response_mask: torch.Tensor) -> BatchCounts:
    """Counts of the rows at hand. Use the mask the loss will see: after rejection, before row padding and trimming."""
    kept = response_mask.bool().sum(dim=-1)
    num_tokens, num_sequences = torch.stack((kept.sum(), (kept > 0).sum())).tolist()
    return BatchCounts(num_tokens, num_sequences, response_mask.shape[0], response_mask.shape[1])


def trajectory_row_weights(response_mask: torch.Tensor, trajectories: torch.Tensor) -> torch.Tensor:
    """The share of its trajectory's kept tokens that each row holds; `trajectories[i]` is the number of row i's.

    They add up to 1 over a trajectory, so it weighs the same in a mean over sequences, however many rows it became.
    """
    kept = response_mask.bool().sum(dim=-1).double()
    total = torch.zeros(int(trajectories.max()) + 1, dtype=torch.float64).index_add_(0, trajectories, kept)
    return (kept / total[trajectories].clamp(min=1)).float()


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    counts: BatchCounts | None = None,
    loss_scale_factor: float | None = None,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """This shard's share of the aggregated loss, a scalar; 0 when no token is kept.

    `counts=None` says that these rows are the whole mini-batch. `loss_scale_factor` is the horizon that
    `seq-mean-token-sum-norm` divides by; by default the mini-batch's padded response width. The last four are how
    losses written for verl hand counts on: a factor of the result, tokens and sequences of the mini-batch, and the
    rows' weights where they have any.
    """
    if counts is None and batch_num_tokens is not None and global_batch_size is not None:
        counts = BatchCounts(batch_num_tokens, global_batch_size, global_batch_size, loss_mask.shape[-1], row_weights)
    if dp_size != 1:
        loss_mat = loss_mat * dp_size
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"Unknown loss_agg_mode {loss_agg_mode!r}. Known modes: {', '.join(LOSS_AGG_MODES)}.")
    if loss_agg_mode == "token-mean":
        return token_share(loss_mat, loss_mask, counts)
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask)

    kept = loss_mask.bool().sum(dim=-1)
    row_losses = masked_sum(loss_mat, loss_mask, dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / kept.clamp(min=1)
        if counts is not None and counts.row_weights is not None:
            row_losses = row_losses * counts.row_weights.to(row_losses)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        row_losses = row_losses / _horizon(loss_mask, counts, loss_scale_factor)
    # Rows without a kept token contribute 0 and are not counted.
    num_sequences = (kept > 0).sum().clamp(min=1) if counts is None else max(counts.num_sequences, 1)
    return row_losses.sum() / num_sequences


def token_share(values: torch.Tensor, mask: torch.Tensor, counts: BatchCounts | None) -> torch.Tensor:
    """This shard's share of the mean over all kept tokens of the mini-batch."""
    num_tokens = mask.bool().sum().clamp(min=1) if counts is None else max(counts.num_tokens, 1)
    return masked_sum(values, mask) / num_tokens


def row_share(values: torch.Tensor, mask: torch.Tensor, counts: BatchCounts | None) -> torch.Tensor:
    """This shard's share of the mean of one value per row, over the mini-batch's rows that keep a token.

    A trajectory of several rows counts as one: its rows are averaged by their tokens.
    """
    kept = mask.bool().any(dim=-1)
    if counts is not None and counts.row_weights is not None:
        values = values * counts.row_weights.to(values)
    return masked_sum(values, kept) / (kept.sum().clamp(min=1) if counts is None else max(counts.num_sequences, 1))


def _horizon(loss_mask: torch.Tensor, counts: BatchCounts | None, loss_scale_factor: float | None) -> float:
    if loss_scale_factor is not None:
        if loss_scale_factor <= 0:
            raise ValueError(f"loss_scale_factor={loss_scale_factor} must be positive: it divides the loss.")
        return loss_scale_factor
    return max(loss_mask.shape[-1] if counts is None else counts.response_width, 1)
