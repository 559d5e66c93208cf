"""`DataProtoFuture`: the type of a batch that workers are still making. Made in `dovetail.controller.futures`."""

from __future__ import annotations

from dovetail.protocol.dataproto import DataProto


class DataProtoFuture:
    """Passing it on does not wait; `get` does."""

    def get(self) -> DataProto:
        """Wait for the workers and return the batch, or this rank's part of it."""
        raise NotImplementedError
