"""Add up what micro-batches and ranks report about one optimizer step, then average over steps.

A loss function returns shares (see `dovetail.algorithms.aggregate`): they are added, never averaged. Only whole steps
are averaged. Knows no metric by name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dovetail.algorithms import BatchCounts, count_batch
from dovetail.backends.base import StepResult, TrainBackend
from dovetail.protocol import DataProto

LOSS_WEIGHT = "loss_weight"
"""Column: the share of its trajectory's trained tokens that a row holds. Absent where each row is a trajectory."""


def global_counts(mini_batch: DataProto, backend: TrainBackend) -> BatchCounts:
    """Counts of the mini-batch of which this rank holds these rows."""
    columns = mini_batch.tensors
    local = count_batch(columns["response_mask"])
    numbers = torch.tensor([local.num_tokens, local.num_sequences, local.num_rows])
    if LOSS_WEIGHT in columns:
        numbers = numbers.double()
        numbers[1] = columns[LOSS_WEIGHT].double().sum()
    tokens, sequences, rows = backend.sum_over_dp(numbers).tolist()
    # The width is that of the whole padded batch: the driver sends equally wide parts to all ranks.
    return BatchCounts(int(tokens), round(sequences), int(rows), local.response_width)


def with_row_weights(counts: BatchCounts, micro_batch: DataProto) -> BatchCounts:
    """Counts of the mini-batch, with the weights of these rows where they have any."""
    weights = micro_batch.tensors.get(LOSS_WEIGHT)
    return counts if weights is None else replace(counts, row_weights=weights)


def add_shares(parts: Sequence[Mapping[str, Tensor | float]], backend: TrainBackend) -> dict[str, float]:
    """The value of each metric over the whole mini-batch. One transfer to the host, one reduction."""
    names = sorted(parts[0]) if parts else []
    if not names:
        return {}
    rows = [torch.stack([_number(part[name], backend.device) for name in names]) for part in parts]
    totals = backend.sum_over_dp(torch.stack(rows).sum(dim=0))
    return dict(zip(names, totals.tolist(), strict=True))


class StepLog:
    """Metrics of the optimizer steps of one update; `result` is what the driver gets."""

    def __init__(self, area: str) -> None:
        self._area = area
        self._values: dict[str, list[float]] = defaultdict(list)
        self._steps: list[StepResult] = []

    def add(self, metrics: Mapping[str, float], step: StepResult) -> None:
        for name, value in metrics.items():
            self._values[name].append(value)
        self._steps.append(step)

    def result(self) -> dict[str, float]:
        """Means over optimizer steps; the norm over the steps that were taken; the rate of the last one."""
        metrics = {name: sum(values) / len(values) for name, values in self._values.items()}
        norms = [step.grad_norm for step in self._steps if not step.skipped]
        metrics[f"{self._area}/grad_norm"] = sum(norms) / len(norms) if norms else math.nan
        metrics[f"{self._area}/lr"] = self._steps[-1].lr
        metrics[f"{self._area}/skipped_steps"] = float(sum(step.skipped for step in self._steps))
        return metrics


def _number(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).detach()
