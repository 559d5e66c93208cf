"""`PromptLoader`: batches of prompts in the sampler's order, made ahead if asked. Its state is the sampler's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dovetail.data.prompts import PromptDataset, collate
from dovetail.data.sampler import PromptSampler
from dovetail.data.torch_sampler import TorchOrder
from dovetail.protocol import DataProto


class Prompts(Protocol):
    """What a dataset must have: examples by number, as dicts with the columns of the schema's `dataset` stage."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Read:
    """The sum over the content of the first `count` rows of an epoch."""

    epoch: int = -1
    count: int = 0
    total: int = 0


def _hex(total: int) -> str:
    return f"{total:016x}"


class PromptLoader:
    """Iterate for one epoch, or call `next_batch` without end. Each of `num_workers` threads makes a batch ahead."""

    def __init__(self, dataset: Prompts, sampler: PromptSampler, *, num_workers: int = 0) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="prompts") if num_workers else None
        self._ahead: deque[tuple[dict[str, Any], Future[DataProto]]] = deque()
        # The sampler may run some batches ahead of what has been given out; this is the state that counts.
        self._state = sampler.state_dict()
        self._read = _Read()

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        """Epoch of the last batch given out."""
        return int(self._state["epoch"])

    def __iter__(self) -> Iterator[DataProto]:
        """The batches left in this epoch."""
        for _ in range(self.sampler.batches_after(int(self._state["position"]))):
            yield self.next_batch()
        self._state = {**self._state, "epoch": self.epoch + 1, "position": 0}

    def next_batch(self) -> DataProto:
        """The next batch, in the next epoch when this one is over."""
        if self._threads is None:
            indices = self.sampler.next_batch()
            self._state = self.sampler.state_dict()
            return self._make(indices)
        while len(self._ahead) <= self._num_workers:
            indices = self.sampler.next_batch()
            self._ahead.append((self.sampler.state_dict(), self._threads.submit(self._make, indices)))
        self._state, future = self._ahead.popleft()
        return future.result()

    def show_batch(self, batch: DataProto) -> None:
        """The batch of a finished step, for a sampler that learns from it (curriculum)."""
        if isinstance(self.sampler, TorchOrder) and self.sampler.learns:
            self.sampler.update(batch)
            # The next batch follows from what it has learned, and from where it stands now.
            self._state = self.sampler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, whatever has been made ahead, and a digest of what was read in this epoch."""
        if not isinstance(self.dataset, PromptDataset) or isinstance(self.sampler, TorchOrder):
            return dict(self._state)
        return {**self._state, "read": self._digest_of_epoch(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dataset = self.dataset
        digest = (lambda rows: _hex(dataset.content_digest(rows))) if isinstance(dataset, PromptDataset) else None
        self.sampler.load_state_dict(state, digest)
        self._ahead.clear()
        self._state = self.sampler.state_dict()
        self._read = _Read()

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _digest_of_epoch(self, dataset: PromptDataset) -> str:
        epoch, position = int(self._state["epoch"]), int(self._state["position"])
        read = self._read
        if read.epoch != epoch or read.count > position:
            read = _Read(epoch)
        # Only what was read since the last time: a checkpoint must not cost a pass over the epoch.
        rows = self.sampler.epoch_order(epoch)[read.count : position]
        self._read = _Read(epoch, position, (read.total + dataset.content_digest(rows)) % 2**64)
        return _hex(self._read.total)

    def _make(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        return collate([self.dataset[int(index)] for index in indices])
