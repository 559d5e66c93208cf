"""Results that workers are still making. Passing one on does not wait; `get` does.

`GroupFuture` is what a non-blocking call returns. `BatchFuture` is its kind for calls whose result is one `DataProto`:
given to another group it travels as references, and each rank fetches only the rows it needs from where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.observability.waits import waiting
from dovetail.protocol import DataProto, DataProtoFuture

_LONG_S = 1800.0
"""The driver ends the call that makes the rows when that hangs; this only names who waits for it."""


class PendingCall(Protocol):
    """A call in flight on some ranks, as the launcher of the processes knows it."""

    def wait(self, timeout: float | None = None, meanwhile: Callable[[], None] | None = None) -> dict[int, Any]:
        """The outputs by rank. Raises `WorkerError` as soon as one rank fails. `meanwhile` is called now and then."""
        ...

    def done(self) -> bool:
        """Whether every rank has finished or failed."""
        ...


class GroupFuture:
    """The result of a call on a group, later."""

    def __init__(self, pending: PendingCall, collect: Callable[[dict[int, Any]], Any]) -> None:
        self._pending = pending
        self._collect = collect
        self._result: tuple[Any] | None = None

    def get(self, timeout: float | None = None, *, meanwhile: Callable[[], None] | None = None) -> Any:
        """Wait for all ranks and return what the blocking call would have returned. Raises what it would have raised.

        ``timeout`` is in seconds; when it passes, `TimeoutError` is raised and the call goes on. Without it, a call
        that takes far longer than earlier ones (`hangs`) is ended, and raises `WorkerHungError`.
        ``meanwhile`` is called twice a second, and looks after other groups: their deaths do not end this wait then.
        """
        if self._result is None:
            self._result = (self._collect(self._pending.wait(timeout, meanwhile)),)
        return self._result[0]

    def done(self) -> bool:
        """Whether `get` would return or raise at once."""
        return self._result is not None or self._pending.done()


@dataclass(frozen=True)
class BatchPart:
    """The output of one rank where it lies: a reference to the rows and one to their number."""

    batch: Any
    num_rows: Any


class BatchFuture(GroupFuture, DataProtoFuture):
    """A `DataProto` that a group is still making.

    ``lazy`` says that it can be passed on as references. It cannot when its parts hold padding rows, which only `get`
    can drop, or when they are not in Ray.
    """

    def __init__(
        self,
        pending: PendingCall,
        collect: Callable[[dict[int, Any]], DataProto],
        parts: Sequence[BatchPart],
        *,
        lazy: bool,
    ) -> None:
        super().__init__(pending, collect)
        self.parts = tuple(parts)
        self.lazy = lazy

    def get(self, timeout: float | None = None, *, meanwhile: Callable[[], None] | None = None) -> DataProto:
        return GroupFuture.get(self, timeout, meanwhile=meanwhile)

    def chunk(self, chunks: int) -> list[BatchSlice]:
        """One slice per data-parallel rank, each for its equal share of the rows. Waits for nothing."""
        if not self.lazy:
            raise ValueError("this future holds padding rows or is not in Ray: it cannot be chunked; call get() first.")
        return [BatchSlice(self.parts, rank, chunks) for rank in range(chunks)]


class BatchSlice(DataProtoFuture):
    """The ``index``-th of ``chunks`` equal shares of a batch whose parts are on their way. Pickles as references."""

    def __init__(self, parts: Sequence[BatchPart], index: int, chunks: int) -> None:
        self.parts = tuple(parts)
        self.index = index
        self.chunks = chunks

    def get(self) -> DataProto:
        """Fetch the rows of this share, and only the parts that hold them. Runs in the process that needs them."""
        import ray

        with waiting("this rank", "rows that another group makes", limit_s=_LONG_S):
            num_rows = ray.get([part.num_rows for part in self.parts])
        ranges = zip(self.parts, self._overlaps(num_rows), strict=True)
        wanted = [(part.batch, rows) for part, rows in ranges if rows != (0, 0)]
        if not wanted:  # batches without columns carry only meta_info: there is nothing to share out
            wanted = [(part.batch, (0, 0)) for part in self.parts]
        with waiting("this rank", f"{len(wanted)} parts of a batch from other nodes", limit_s=_LONG_S):
            batches = ray.get([batch for batch, _ in wanted])
        return DataProto.concat([batch[first:last] for batch, (_, (first, last)) in zip(batches, wanted, strict=True)])

    def _overlaps(self, num_rows: Sequence[int]) -> list[tuple[int, int]]:
        """For each part the range of its rows that belongs to this share; ``(0, 0)`` for none."""
        total = sum(num_rows)
        if total % self.chunks:
            raise ValueError(
                f"a future of {total} rows cannot be shared by {self.chunks} data-parallel ranks; call get() on it and "
                f"pass the batch (which may be padded), or use a multiple of {self.chunks} rows."
            )
        share = total // self.chunks
        start, stop = self.index * share, (self.index + 1) * share
        ranges, offset = [], 0
        for rows in num_rows:
            first, last = max(start - offset, 0), min(stop - offset, rows)
            ranges.append((first, last) if first < last else (0, 0))
            offset += rows
        return ranges
