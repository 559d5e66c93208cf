"""`PromptSampler`: which prompts come next. The order is a function of (seed, epoch); the state is where we are in it.

No random generator is kept, so a crash loses nothing: epoch and position say it all. The shuffle is a sort by a hash of
our own, so no library upgrade changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.data.errors import DataError


class PromptSampler:
    """Gives batches of row numbers. A user's sampler (`data.sampler`) inherits from it and overrides `epoch_order`.

    `source_sizes` are the rows of each file. `weights` give each file a share of every epoch: a file with a share above
    its size is repeated, one below it is spread over several epochs, so all its rows are seen before any comes again.
    """

    def __init__(
        self,
        source_sizes: Sequence[int],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        weights: Sequence[float] | None = None,
        fingerprint: str = "",
    ) -> None:
        self._sizes = list(source_sizes)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._fingerprint = fingerprint
        self._is_mixed = weights is not None
        self._quotas = _quotas(self._sizes, weights)
        self._epoch, self._position = 0, 0
        self._order: np.ndarray | None = None
        if drop_last and self.num_rows < batch_size:
            raise DataError(
                f"there are {self.num_rows} prompts, fewer than one batch of {batch_size}; lower data.train_batch_size "
                "(or data.gen_batch_size), or add data."
            )

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """Rows of this epoch given out so far."""
        return self._position

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return sum(self._quotas)

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self.batches_after(0)

    def batches_after(self, position: int) -> int:
        """Batches left in an epoch of which `position` rows have been given out."""
        whole, rest = divmod(self.num_rows - position, self._batch_size)
        return whole if self._drop_last or rest == 0 else whole + 1

    def __iter__(self) -> Iterator[np.ndarray]:
        """The batches left in this epoch; then the next epoch is up."""
        while not self._is_over():
            yield self.next_batch()
        self._begin(self._epoch + 1)

    def next_batch(self) -> np.ndarray:
        """The next batch, from the next epoch when this one is over."""
        if self._is_over():
            self._begin(self._epoch + 1)
        if self._order is None:
            self._order = self.epoch_order(self._epoch)
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += len(batch)
        return batch

    def epoch_order(self, epoch: int) -> np.ndarray:
        """All row numbers of one epoch in order. Must depend on its arguments and the seed only."""
        first_rows = np.cumsum([0, *self._sizes])
        parts = [
            first_rows[source] + self._from_source(source, epoch * quota, quota)
            for source, quota in enumerate(self._quotas)
        ]
        rows = np.concatenate(parts)
        if self._shuffle:
            return rows[shuffled(len(rows), self._seed, epoch)]
        if not self._is_mixed:
            return rows
        # Weighted and in order: each source spread evenly over the epoch.
        places = np.concatenate([(np.arange(quota) + 0.5) / max(quota, 1) for quota in self._quotas])
        return rows[np.argsort(places, kind="stable")]

    def state_dict(self) -> dict[str, Any]:
        """Small and plain; goes into the checkpoint."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Other data or another order is an error: a position means nothing there."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise DataError(
                    f"the checkpoint was made with {_WORDS[name]} {state.get(name)!r} and this run has {value!r}; its "
                    f"position in the data (epoch {state['epoch']}, row {state['position']}) cannot be continued. "
                    f"{_WAY_OUT[name]}"
                )
        self._begin(int(state["epoch"]))
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "quotas": list(self._quotas),
        }

    def _is_over(self) -> bool:
        left = self.num_rows - self._position
        return left < self._batch_size if self._drop_last else left <= 0

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position, self._order = epoch, 0, None

    def _from_source(self, source: int, start: int, count: int) -> np.ndarray:
        """`count` rows of a source from place `start` of its endless stream of passes."""
        size = self._sizes[source]
        if count == 0:
            return np.empty(0, dtype=np.int64)
        if not self._shuffle or count == size:
            return np.arange(start, start + count) % size
        passes = range(start // size, (start + count - 1) // size + 1)
        stream = np.concatenate([shuffled(size, self._seed, number, source) for number in passes])
        offset = start % size
        return stream[offset : offset + count]


_WORDS = {
    "fingerprint": "data with the fingerprint",
    "seed": "the data seed",
    "shuffle": "data.shuffle",
    "quotas": "rows per file and epoch",
}
_WAY_OUT = {
    "fingerprint": "Put the same files and filters back, or start anew with trainer.resume_mode=disable.",
    "seed": "Set data.seed (or trainer.seed) back.",
    "shuffle": "Set data.shuffle back.",
    "quotas": "Set the files and their weights back.",
}


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of `range(count)` that depends on `key` only."""
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for part in key:
            state = _mix(state ^ np.array(part, dtype=np.int64).astype(np.uint64)[()])
        keys = _mix(np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95) + state)
    return np.argsort(keys, kind="stable")


def _mix(value: Any) -> Any:
    """The finaliser of splitmix64 (https://prng.di.unimi.it/splitmix64.c): every input bit reaches every output bit."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _quotas(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Rows of each source in an epoch: its size, or its share of the total by weight (largest remainders round up)."""
    if weights is None:
        return list(sizes)
    if len(weights) != len(sizes) or min(weights) < 0 or sum(weights) <= 0:
        raise DataError(
            f"data.train_weights={list(weights)} does not fit {len(sizes)} files; give one weight of 0 or more each."
        )
    usable = [weight if size else 0.0 for weight, size in zip(weights, sizes, strict=True)]
    exact = [sum(sizes) * weight / sum(usable) for weight in usable]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_remainder[: sum(sizes) - sum(quotas)]:
        quotas[i] += 1
    return quotas
