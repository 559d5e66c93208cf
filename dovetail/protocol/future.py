"""`DataProtoFuture`: a batch that workers are still making. Passing it on does not wait; `get` does.

Knows futures only as things `wait` can resolve: Ray object references by default, anything with the ``wait`` you give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dovetail.protocol.dataproto import DataProto


def wait_ray(futures: Sequence[Any]) -> list[Any]:
    """Resolve Ray object references."""
    import ray  # here, so that a program without Ray can use batches

    return ray.get(list(futures))


@dataclass
class DataProtoFuture:
    """The outputs of a group of workers as one batch, later.

    ``collect_fn`` joins the outputs into one batch; ``dispatch_fn`` then picks the part that one rank needs. A future
    holds references, so it pickles cheaply and each rank can resolve its own part where it runs.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    wait: Callable[[Sequence[Any]], list[Any]] = field(default=wait_ray)

    @staticmethod
    def concat(data: Sequence[Any], wait: Callable[[Sequence[Any]], list[Any]] = wait_ray) -> DataProtoFuture:
        """A future for the concatenation of what these futures give."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=list(data), wait=wait)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future per rank, each for its equal part. Waits for nothing."""
        if chunks <= 0:
            raise ValueError(f"chunks={chunks} must be positive.")
        return [
            replace(self, dispatch_fn=partial(_chunk_of_rank, self.dispatch_fn, rank, chunks)) for rank in range(chunks)
        ]

    def get(self) -> DataProto:
        """Wait for the workers and return the batch, or this rank's part of it."""
        outputs = self.wait(self.futures)
        for number, output in enumerate(outputs):
            if not isinstance(output, DataProto):
                raise TypeError(
                    f"future {number} of {len(outputs)} gave a {type(output).__name__}; every worker must return a "
                    f"DataProto for a DataProtoFuture."
                )
        batch = self.collect_fn(outputs)
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)


def _chunk_of_rank(
    before: Callable[[DataProto], DataProto] | None, rank: int, chunks: int, batch: DataProto
) -> DataProto:
    return (batch if before is None else before(batch)).chunk(chunks)[rank]
