"""`OfflineTrainer`: a step of training on a data set (`sft`, `dpo`, `reward`): a batch, one update, its metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.config.root import DovetailConfig
from dovetail.controller import RayClassWithInitArgs, WorkerGroup
from dovetail.protocol import DataProto
from dovetail.trainer.arrange import PADDING, imbalance, lay_out
from dovetail.trainer.base import BaseTrainer, Metrics
from dovetail.trainer.groups import TrainedGroups, start_processes
from dovetail.trainer.step_metrics import memory_metrics, throughput_metrics, timing_metrics, update_metrics
from dovetail.workers.offline import IS_PADDING, MESH, OfflineWorker

_OWN_AREAS = ("actor/", "critic/", "memory/")
"""Metrics of an update that are not the loss's."""


@dataclass(frozen=True)
class OfflineGroups(TrainedGroups):
    """The one group of an offline run; `folder` is its folder in a checkpoint."""

    group: WorkerGroup
    folder: str = "actor"

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return {self.folder: self.group}


def create_offline_groups(
    config: DovetailConfig, worker: type[OfflineWorker], *, use_ray: bool, use_gpu: bool, folder: str = "actor"
) -> OfflineGroups:
    """Start the processes. No engine and no reward anywhere."""
    roles = {folder: RayClassWithInitArgs(worker, config=config)}
    processes, groups = start_processes(config, roles, use_ray=use_ray, use_gpu=use_gpu)
    return OfflineGroups(processes, groups[folder], folder)


class OfflineTrainer(BaseTrainer[OfflineGroups]):
    """Trains one group. `rows_per_example` rows of a batch belong together; `phase` names the update in timings. The
    other arguments are those of `BaseTrainer`."""

    def __init__(
        self,
        config: DovetailConfig,
        *,
        rows_per_example: int = 1,
        phase: str = "update_actor",
        **run: Any,
    ) -> None:
        super().__init__(config, **run)
        self._rows_per_example = rows_per_example
        self._phase = phase

    def _init_models(self, groups: OfflineGroups) -> None:
        groups.group.init_model(self.total_steps)
        self.utilisation.ask_peaks(trains=groups.group)

    def _train_step(self) -> Metrics:
        metrics: Metrics = {"training/global_step": self.global_step}
        with self.timers("step"):
            with self.timers("data"):
                batch = self._prepared(self.train_loader.next_batch(), "train")
            metrics["training/epoch"] = self.train_loader.epoch
            with self.timers(self._phase):
                rows = self._laid_out(batch)
                reported = update_metrics(self.groups.group.update(rows))
        metrics |= {name if name.startswith(_OWN_AREAS) else f"train/{name}": reported[name] for name in reported}
        by_rank = rows.tensors["attention_mask"].sum(dim=1) * (1 - rows.tensors[IS_PADDING])
        metrics |= imbalance(by_rank.tolist(), self.groups.group.dp_size(MESH))
        self._report(batch, metrics)
        return metrics

    def _prepared(self, batch: DataProto, name: str) -> DataProto:
        """A batch of the data set `train` or `val`, with what the loss reads beside its rows."""
        return batch

    def _trained_rows(self, batch: DataProto) -> DataProto:
        """The rows of a batch that the loss is of."""
        return batch

    def _validate(self) -> Metrics:
        """The loss, and its metrics, of the validation data; empty without `data.val_files`."""
        if self.val_loader is None:
            return {}
        # Divided by the totals of all batches, not averaged over them: how rows fall into batches changes nothing.
        group = self.groups.group
        totals = _added(update_metrics(group.totals(batch)) for batch in self._validation_batches())
        shares = _added(update_metrics(group.evaluate(batch, totals)) for batch in self._validation_batches())
        metrics = {f"val/{name}": value for name, value in shares.items()}
        self.tracker.event("validation", self.global_step, **metrics)
        return metrics

    def _validation_batches(self) -> Iterator[DataProto]:
        assert self.val_loader is not None, "only called with one"
        return (self._laid_out(self._prepared(batch, "val")) for batch in self.val_loader)

    def _laid_out(self, batch: DataProto) -> DataProto:
        """Rows in the order in which ranks take them: as many examples and nearly as many tokens each."""
        size = self._rows_per_example
        ranks, num_examples = self.groups.group.dp_size(MESH), len(batch) // size
        lengths = batch.tensors["attention_mask"].sum(dim=1).reshape(num_examples, size).sum(dim=1).tolist()
        layout = lay_out(lengths, ranks, [num_examples], balance=self.config.trainer.balance_batch).rows
        shortest = min(range(num_examples), key=lengths.__getitem__)
        examples = [shortest if example == PADDING else example for example in layout]
        rows = [size * example + row for example in examples for row in range(size)]
        padding = torch.tensor([example == PADDING for example in layout for _ in range(size)], dtype=torch.int8)
        return batch.select_idxs(rows).union(DataProto.from_dict({IS_PADDING: padding}))

    def _report(self, batch: DataProto, metrics: Metrics) -> None:
        tokens, rows = int(batch.tensors["attention_mask"].sum()), self._trained_rows(batch)
        lengths, trained = rows.tensors["attention_mask"].sum(dim=1), int(rows.tensors["loss_mask"].sum())
        seconds = self.timers.seconds()
        metrics |= {"train/trained_tokens": float(trained), "train/rows": float(len(rows))}
        metrics |= timing_metrics(seconds, tokens, 0)
        metrics |= throughput_metrics(seconds["step"], tokens, self.config.trainer.world_size)
        metrics |= memory_metrics(metrics)
        metrics |= self.utilisation.of_update(self._phase, lengths.tolist(), trained, seconds)

    def _driver_state(self) -> dict[str, Any]:
        return {"loader": self.train_loader.state_dict()}

    def _load_driver_state(self, state: dict[str, Any]) -> None:
        self.train_loader.load_state_dict(state["loader"])


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            sums[name] += value
    return dict(sums)
