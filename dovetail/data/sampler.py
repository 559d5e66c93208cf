"""`PromptSampler`: which prompts come next. The order is a function of (seed, epoch); the state is where we are in it.

No random generator is kept, so a crash loses nothing: epoch and position say it all. The shuffle is a sort by a hash of
our own, so no library upgrade changes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.data.errors import DataError

logger = logging.getLogger(__name__)


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
        self._row_ids: np.ndarray | None = None
        self._files = ""
        if drop_last and self.num_rows < batch_size:
            raise DataError(
                f"there are {self.num_rows} prompts, fewer than one batch of {batch_size}; lower data.train_batch_size "
                "(or data.gen_batch_size), or add data."
            )

    def follow(self, row_ids: np.ndarray, files: str) -> None:
        """Order rows by numbers that filters do not change, so that a run can go on when rows are left out.

        `files` is a digest of the files' content.
        """
        assert len(row_ids) == sum(self._sizes), f"{len(row_ids)} numbers for {sum(self._sizes)} rows"
        self._row_ids, self._files, self._order = row_ids, files, None

    @property
    def epoch(self) -> int:
        return self._epoch

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
        batch = self.order_of(self._epoch)[self._position : self._position + self._batch_size]
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
        if self._shuffle and self._row_ids is not None and not self._is_mixed:
            return rows[np.argsort(_hashes(self._row_ids, self._seed, epoch), kind="stable")]
        if self._shuffle:
            return rows[shuffled(len(rows), self._seed, epoch)]
        if not self._is_mixed:
            return rows
        # Weighted and in order: each source spread evenly over the epoch.
        places = np.concatenate([(np.arange(quota) + 0.5) / max(quota, 1) for quota in self._quotas])
        return rows[np.argsort(places, kind="stable")]

    def order_of(self, epoch: int) -> np.ndarray:
        """`epoch_order`, which is kept of the epoch under way: it sorts all rows."""
        if epoch != self._epoch:
            return self.epoch_order(epoch)
        if self._order is None:
            self._order = self.epoch_order(epoch)
        return self._order

    def state_dict(self) -> dict[str, Any]:
        """Small and plain; goes into the checkpoint."""
        state = {"epoch": self._epoch, "position": self._position, **self._identity()}
        if self._row_ids is None:
            return state
        last = self._row_ids[self.order_of(self._epoch)[self._position - 1]] if self._position else -1
        return {**state, "files": self._files, "last_row": int(last)}

    def load_state_dict(self, state: dict[str, Any], digest: Callable[[np.ndarray], str] | None = None) -> None:
        """Continue where `state` was taken. Another order is an error, and so are other rows among those read.

        Rows that were left out or have changed since are fine where none of them was read in this epoch, or the files
        are the same; `digest` says what the content of some rows is.
        """
        different = [name for name, value in self._identity().items() if state.get(name) != value]
        position = int(state["position"])
        if different:
            new_position = None if set(different) - {"fingerprint", "quotas"} else self._position_after(state, digest)
            if new_position is None:
                raise DataError(self._refusal(state, different[0]))
            logger.warning(
                "the rows of the data differ from the checkpoint's (%d in an epoch, it had %d), and none of those read "
                "in this epoch does: going on at epoch %d, row %d",
                self.num_rows, sum(state["quotas"]), int(state["epoch"]), new_position,
            )  # fmt: skip
            position = new_position
        self._begin(int(state["epoch"]))
        self._position = position

    def _position_after(self, state: dict[str, Any], digest: Callable[[np.ndarray], str] | None) -> int | None:
        """How many rows of this epoch come no later than the last one read; None where that cannot be said."""
        ordered = type(self).epoch_order is PromptSampler.epoch_order and not self._is_mixed
        if self._row_ids is None or not ordered or "last_row" not in state:
            return None
        epoch, last = int(state["epoch"]), int(state["last_row"])
        if int(state["position"]) == 0:
            return 0
        ids = self._row_ids
        if self._shuffle:
            hashes, border = _hashes(ids, self._seed, epoch), _hashes(np.array([last]), self._seed, epoch)[0]
            count = int(((hashes < border) | ((hashes == border) & (ids <= last))).sum())
        else:
            count = int((ids <= last).sum())
        if state.get("files") != self._files:
            read = None if digest is None else digest(self.epoch_order(epoch)[:count])
            if read is None or read != state.get("read"):
                return None
        return count

    def _refusal(self, state: dict[str, Any], name: str) -> str:
        return (
            f"the checkpoint to continue from was made with {_WORDS[name]} {state.get(name)!r} and this run has "
            f"{self._identity()[name]!r}; its position in the data (epoch {state['epoch']}, row {state['position']}) "
            f"cannot be continued. {_WAY_OUT[name]}"
        )

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
    "fingerprint": "To continue it, put the same files back (rows not read yet may change in place; "
    "data.skip_bad_rows=True and data.filter_overlong_prompts=True may leave rows out). For a new run, give another "
    "folder (output=), or start over here with trainer.resume_mode=disable.",
    "seed": "Set data.seed (or trainer.seed) back.",
    "shuffle": "Set data.shuffle back.",
    "quotas": "Set the files and their weights back.",
}


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of `range(count)` that depends on `key` only."""
    return np.argsort(_hashes(np.arange(count), *key), kind="stable")


def _hashes(numbers: np.ndarray, *key: int) -> np.ndarray:
    """A hash of each number that depends on it and on `key` only: what rows are sorted by."""
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for part in key:
            state = _mix(state ^ np.array(part, dtype=np.int64).astype(np.uint64)[()])
        return _mix(numbers.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + state)


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
