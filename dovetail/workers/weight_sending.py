"""The trainer's side of a weight broadcast to engines elsewhere: rank 0 sends, every rank gathers along.

An engine that dies in the middle must not take the trainer with it: what happened is returned, not raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dovetail.backends.base import TrainBackend
from dovetail.config.fsdp import full_dtype
from dovetail.config.rollout import RolloutConfig
from dovetail.weight_sync import GroupAddress, WeightSender
from dovetail.workers.weight_check import SentWeights, WatchedWeights

_MIB = 1024**2


@dataclass(frozen=True)
class SendResult:
    """`sent` on rank 0, for the engines to compare; `problem` when the engines could not be reached."""

    sent: SentWeights | None = None
    problem: str = ""


class WeightSending:
    """Sends one backend's weights, again and again, to the receivers of one group."""

    def __init__(self, backend: TrainBackend, rollout: RolloutConfig) -> None:
        self._backend = backend
        self._dtype = full_dtype(rollout.dtype)
        self._bucket_bytes = rollout.update_weights_bucket_megabytes * _MIB
        self._sender: WeightSender | None = None

    def open(self, num_receivers: int, host: str) -> GroupAddress | None:
        """A new group, on rank 0; its address is for the receivers. An older group is forgotten."""
        if self._backend.place.rank != 0:
            return None
        on_gpu = self._backend.device.type == "cuda"
        self._sender = WeightSender(
            num_receivers,
            host=host,
            backend="nccl" if on_gpu else "gloo",
            device=self._backend.device if on_gpu else "cpu",
        )
        return self._sender.address

    def connect(self) -> SendResult:
        """Blocks until every receiver has joined."""
        try:
            if self._sender is not None:
                self._sender.connect()
        except (RuntimeError, OSError) as error:
            return SendResult(problem=f"{type(error).__name__}: {error}")
        return SendResult()

    def send(self) -> SendResult:
        """All weights to all engines. Collective over the trainer's ranks, whatever happens to the engines."""
        source = _Source(self._backend.named_weights())
        if self._backend.place.rank != 0:
            for _ in source:
                pass
            return SendResult()
        assert self._sender is not None, "open() comes first"
        watched = WatchedWeights(source, self._backend.hf_config, self._dtype)
        try:
            self._sender.send(watched, self._bucket_bytes)
        except (RuntimeError, OSError) as error:
            if source.failed:
                raise
            for _ in source:  # the other ranks are still gathering
                pass
            return SendResult(problem=f"{type(error).__name__}: {error}")
        return SendResult(watched.sent())


class _Source:
    """A stream that can be read on after a reader has given up, and knows whether it failed itself."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise
