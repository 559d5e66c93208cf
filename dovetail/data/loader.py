"""`PromptLoader`: batches of prompts in the sampler's order, made one ahead if asked. Its state is the sampler's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from dovetail.data.prompts import collate
from dovetail.data.sampler import PromptSampler
from dovetail.protocol import DataProto


class Prompts(Protocol):
    """What a dataset must have: examples by number, as dicts with the columns of the schema's `dataset` stage."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class PromptLoader:
    """Iterate for one epoch, or call `next_batch` without end. `prefetch` makes the next batch in a thread."""

    def __init__(self, dataset: Prompts, sampler: PromptSampler, *, prefetch: bool = False) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts") if prefetch else None
        self._ahead: tuple[dict[str, Any], Future[DataProto]] | None = None
        # The sampler may run one batch ahead of what has been given out; this is the state that counts.
        self._state = sampler.state_dict()

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
        if self._thread is None:
            indices = self.sampler.next_batch()
            self._state = self.sampler.state_dict()
            return self._make(indices)
        state, future = self._ahead or self._start()
        self._ahead = self._start()
        self._state = state
        return future.result()

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, whatever has been prefetched."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self._ahead = None
        self._state = self.sampler.state_dict()

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self) -> tuple[dict[str, Any], Future[DataProto]]:
        assert self._thread is not None, "only with prefetch"
        indices = self.sampler.next_batch()
        return self.sampler.state_dict(), self._thread.submit(self._make, indices)

    def _make(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        return collate([self.dataset[int(index)] for index in indices])
