"""Offline training in one process: one `OfflineLoss` on one backend. Knows no data format and no sharding.

`OfflineWorker` is the policy's worker for `sft` and `dpo`; a method with another network overrides what it builds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dovetail.algorithms.masked import at_least_float32, masked_sum
from dovetail.algorithms.offline.registry import LOSS_MASK, REF_LOG_PROB, OfflineLoss
from dovetail.backends.base import ForwardOptions, LossFn, TokenOutput, TrainBackend
from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, register
from dovetail.models.transfer import to_device
from dovetail.protocol import DataProto
from dovetail.workers.build import build_actor
from dovetail.workers.micro_batches import MicroBatchLimit, cut, plan_micro_batches, restore
from dovetail.workers.response_columns import take_columns
from dovetail.workers.shares import StepLog, add_shares
from dovetail.workers.training_role import CheckpointedRole, loaded

IS_PADDING = "is_padding"
"""Column: 1 on rows that only make the ranks' shares equal. No loss and no count sees them."""
MESH = "trained"
_INPUTS = ("input_ids", "attention_mask", "position_ids", IS_PADDING)


class OfflineLearner:
    """Updates and validation of one model by one loss. A batch is one optimizer step."""

    def __init__(self, backend: TrainBackend, loss: OfflineLoss, limit: MicroBatchLimit, *, area: str = "actor"):
        self.backend = backend
        self._loss = loss
        self._limit = limit
        self._area = area
        # The head is computed for the tokens that count, not for prompts.
        self._options = ForwardOptions(only_column=LOSS_MASK if loss.reads == "log_probs" else None)
        self.num_updates = 0

    def update(self, data: DataProto) -> dict[str, float]:
        """One optimizer step; metrics over all data-parallel ranks, the loss among them."""
        batch = self._columns(data)
        totals = self._totals(batch)
        trained = self._trained(batch)
        micro_batches = self._cut(trained)
        parts = self.backend.forward_backward(micro_batches, self._loss_fn(totals), self._options)
        log = StepLog(self._area)
        log.add(add_shares(parts, self.backend), self.backend.optim_step())
        self.num_updates += 1
        return log.result()

    def totals(self, data: DataProto) -> dict[str, float]:
        """What the loss and metrics of a batch are divided by, and its baseline; added up, those of several batches."""
        return self._totals(self._columns(data))

    @torch.no_grad()
    def evaluate(self, data: DataProto, totals: Mapping[str, float]) -> dict[str, float]:
        """Shares of the loss and metrics without an update, of all the batches that `totals` are of."""
        micro_batches = self._cut(self._trained(self._columns(data)))
        share = self._loss_fn(totals)
        outputs = self.backend.forward(micro_batches, self._options)
        pairs = zip(outputs, micro_batches, strict=True)
        parts = [share(output, self.backend.on_device(micro_batch))[1] for output, micro_batch in pairs]
        return add_shares(parts, self.backend)

    def log_prob_sums(self, data: DataProto) -> Tensor:
        """`[rows]` on the CPU: the log-probs of each row's `loss_mask` tokens, added up."""
        batch = take_columns(data, ("input_ids", "attention_mask", "position_ids", LOSS_MASK))
        plan = plan_micro_batches(batch, self._limit, self.backend)
        options = ForwardOptions(only_column=LOSS_MASK)
        micro_batches = cut(batch, plan)
        outputs = self.backend.forward(micro_batches, options)
        sums = []
        for output, micro_batch in zip(outputs, micro_batches, strict=True):
            log_probs = at_least_float32(_read(output, "log_probs"))
            sums.append(masked_sum(log_probs, micro_batch.tensors[LOSS_MASK].to(log_probs.device), dim=-1))
        return restore(sums, plan).cpu()

    @property
    def _rows_trained(self) -> int:
        """Rows of an example that are trained, and stay in one micro-batch."""
        return 1 if self._loss.baseline is not None else self._loss.rows_per_example

    def _cut(self, trained: DataProto) -> list[DataProto]:
        return cut(trained, plan_micro_batches(trained, self._limit, self.backend, rows_each=self._rows_trained))

    def _columns(self, data: DataProto) -> DataProto:
        size = self._loss.rows_per_example
        if len(data) % size:
            raise ValueError(f"{len(data)} rows on this rank do not make examples of {size} rows each.")
        batch = take_columns(data, [*_INPUTS, *(name for name in self._loss.columns if name not in _INPUTS)])
        tensors = batch.tensors
        # As a column of objects it stays on the host, where rows are chosen by it.
        padding = tensors.pop(IS_PADDING).bool().numpy()
        return DataProto.from_dict(tensors, {**batch.non_tensor_batch, IS_PADDING: padding}, batch.meta_info)

    def _trained(self, batch: DataProto) -> DataProto:
        size = self._loss.rows_per_example
        return batch if self._rows_trained == size else batch.select_idxs(list(range(0, len(batch), size)))

    def _totals(self, batch: DataProto) -> dict[str, float]:
        """What the shares of the whole batch are divided by."""
        real = _real(batch, torch.device("cpu"))
        own = self._loss.count({name: column[real] for name, column in batch.tensors.items()})
        if self._loss.baseline is not None:
            own |= self._baseline(batch)
        sums = self.backend.sum_over_dp(torch.tensor(list(own.values()), dtype=torch.float64))
        return dict(zip(own, sums.tolist(), strict=True))

    def _baseline(self, batch: DataProto) -> dict[str, float]:
        assert self._loss.baseline is not None, "only called with one"
        size = self._loss.rows_per_example
        others = batch.select_idxs([row for row in range(len(batch)) if row % size])
        plan = plan_micro_batches(others, self._limit, self.backend)
        outputs = self.backend.forward(cut(others, plan), self._options)
        values = restore([_read(output, self._loss.reads) for output in outputs], plan)
        real = _real(others, values.device)
        columns = {name: column.to(values.device)[real] for name, column in others.tensors.items()}
        return self._loss.baseline(values[real], columns)

    def _loss_fn(self, totals: Mapping[str, float]) -> LossFn:
        def loss_fn(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
            values = _read(output, self._loss.reads)
            real = _real(micro_batch, values.device)
            columns = {name: column[real] for name, column in micro_batch.tensors.items()}
            loss, metrics = self._loss.share(values[real], columns, totals)
            return loss, {"loss": loss.detach(), **metrics}

        return loss_fn


class OfflineWorker(CheckpointedRole):
    """A policy that is trained on a data set. A subclass says which loss."""

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__(config)
        self._learner: OfflineLearner | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int = -1) -> None:
        """Build network, optimizer and schedule."""
        self.join_group()
        section = self._section
        backend = self._build_backend(total_training_steps)
        limit = MicroBatchLimit.of_update(section, 1)
        self._learner = OfflineLearner(backend, self._build_loss(), limit, area=self._trains)
        self.register_in_mesh(MESH, backend)
        self._init_engine(backend)
        backend.offload(params=section.offloading.param_offload, optimizer=section.offloading.optimizer_offload)

    @register(dispatch_mode=Dispatch.mesh(MESH))
    def update(self, data: DataProto) -> DataProto:
        """One optimizer step; metrics in `meta_info["metrics"]`, equal on every rank."""
        with loaded(self._trained.backend, self._section.offloading, trains=True):
            metrics = self._trained.update(data)
            metrics.update(self._trained.backend.memory())
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.mesh(MESH))
    def totals(self, data: DataProto) -> DataProto:
        """What `evaluate` divides by, in `meta_info["metrics"]`; to be added up over batches."""
        with loaded(self._trained.backend, self._section.offloading):
            return DataProto(meta_info={"metrics": self._trained.totals(data)})

    @register(dispatch_mode=Dispatch.mesh(MESH))
    def evaluate(self, data: DataProto, totals: Mapping[str, float]) -> DataProto:
        """Shares of loss and metrics without an update, in `meta_info["metrics"]`; to be added up over batches."""
        with loaded(self._trained.backend, self._section.offloading):
            return DataProto(meta_info={"metrics": self._trained.evaluate(data, totals)})

    @register(dispatch_mode=Dispatch.mesh(MESH, pad=True))
    def compute_log_prob_sums(self, data: DataProto) -> DataProto:
        """`ref_log_prob_sum` by the current weights: a reference before the first update, adapters with what they have
        learned before the run."""
        with loaded(self._trained.backend, self._section.offloading):
            sums = self._trained.log_prob_sums(data)
        return DataProto.from_dict({REF_LOG_PROB: sums})

    def _build_backend(self, total_training_steps: int) -> TrainBackend:
        return build_actor(
            self.config.actor_rollout_ref,
            total_training_steps,
            world_size=self.world_size,
            device=self.device,
        )

    def _build_loss(self) -> OfflineLoss:
        raise NotImplementedError

    def _init_engine(self, backend: TrainBackend) -> None:
        """For a worker that also generates."""

    @property
    def _trained(self) -> OfflineLearner:
        if self._learner is None:
            raise RuntimeError("init_model has not been called.")
        return self._learner


def _read(output: TokenOutput, name: str) -> Tensor:
    values: Tensor | None = getattr(output, name)
    assert values is not None, f"the backend returns {name} for this kind of network"
    return values


def _real(batch: DataProto, device: torch.device) -> slice | Tensor:
    """The rows that are no padding, to index columns on the device with."""
    padding = batch.non_tensor_batch[IS_PADDING]
    return to_device(torch.from_numpy(np.flatnonzero(~padding)), device) if padding.any() else slice(None)
