"""The reference policy's log-probs of preference data: computed once, before the first update, kept in the run folder.

A later start of the run reads them again, after a check that the data and the model are still the same, wherever the
model's folder lies now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dovetail.algorithms.offline.registry import REF_LOG_PROB
from dovetail.data.errors import DataError
from dovetail.data.preferences import PreferenceDataset
from dovetail.observability.disk import replacing
from dovetail.protocol import DataProto

logger = logging.getLogger(__name__)

FILE = "reference_log_probs.safetensors"
_AT_A_TIME = 64
_CHECKED = 8
"""Examples whose log-probs are computed again at a later start."""

Compute = Callable[[DataProto], Tensor]
"""Sums of the log-probs of each row, by the policy as it was before the first update."""


class ReferenceLogProbs:
    """Two numbers an example, by the name of its data set (`train`, `val`)."""

    def __init__(self, folder: Path, datasets: Mapping[str, PreferenceDataset]) -> None:
        self._file = folder / FILE
        self._datasets = datasets
        self._facts = {f"{name}_data": dataset.fingerprint for name, dataset in datasets.items()}
        self._tables: dict[str, Tensor] = {}

    def prepare(self, compute: Compute, *, resumes: bool) -> None:
        """Read the file, and compute and write what it lacks: all, or a validation set that the run has only now. A run
        that resumes refuses a file that does not fit."""
        if self._file.exists():
            try:
                self._tables = self._read()
                self._check(compute)
            except DataError as error:
                if resumes:
                    raise
                logger.warning("%s They are computed anew.", error)
                self._tables = {}
        missing = {name: dataset for name, dataset in self._datasets.items() if name not in self._tables}
        if not missing:
            return
        for name, dataset in missing.items():
            parts = [
                compute(dataset.batch(np.arange(start, min(start + _AT_A_TIME, len(dataset)))))
                for start in range(0, len(dataset), _AT_A_TIME)
            ]
            self._tables[name] = torch.cat(parts).float().reshape(len(dataset), 2)
        with replacing(self._file) as partial:
            save_file(self._tables, partial, metadata=self._facts)

    def add_to(self, batch: DataProto, name: str) -> DataProto:
        """The batch with the reference's column."""
        examples = torch.as_tensor(batch.non_tensor_batch["index"][::2].astype(np.int64))
        return batch.union(DataProto.from_dict({REF_LOG_PROB: self._tables[name][examples].reshape(-1)}))

    def _read(self) -> dict[str, Tensor]:
        try:
            with safe_open(self._file, framework="pt") as stored:
                facts = stored.metadata() or {}
                tables = {name: stored.get_tensor(name) for name in self._datasets if f"{name}_data" in facts}
        except (SafetensorError, OSError) as error:
            raise self._refusal(f"it cannot be read ({error})") from error
        for name, value in self._facts.items():
            was = facts.get(name)
            if was != value and (was is not None or name != "val_data"):
                raise self._refusal(f"it was computed with other {name.replace('_', ' ')} ({was}, now {value})")
        return tables

    def _check(self, compute: Compute) -> None:
        """Its log-probs say whether it is the same model: its folder may have moved, or its weights have changed."""
        name, dataset = next(iter(self._datasets.items()))
        examples = np.arange(min(_CHECKED, len(dataset)))
        again, kept = compute(dataset.batch(examples)).float(), self._tables[name][: len(examples)].reshape(-1)
        # Another number of devices, or another dtype, rounds differently; another model is far away.
        if not torch.allclose(again, kept, atol=0.05, rtol=0.01):
            worst = int((again - kept).abs().argmax())
            raise self._refusal(f"it has {kept[worst]:.4f} where the model of this run gives {again[worst]:.4f}")

    def _refusal(self, why: str) -> DataError:
        return DataError(
            f"{self._file} holds the reference's log-probs, and {why}; put the model and the data back that the run "
            "began with, or start anew with trainer.resume_mode=disable."
        )
