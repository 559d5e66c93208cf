"""The trainer's side of a weight broadcast to engines on other devices: rank 0 sends, every rank joins the gathering.

An engine that dies during a broadcast must not end the trainer: problems are returned, not raised.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.backends.base import TrainBackend
from dovetail.config.fsdp import full_dtype
from dovetail.config.rollout import RolloutConfig
from dovetail.weight_sync import GatheredWeights, GroupAddress, WeightSender, in_engine_dtype
from dovetail.workers.weight_check import SentWeights, WatchedWeights

_MIB = 1024**2


@dataclass(frozen=True)
class SendResult:
    """`sent` on rank 0 of a checked update, for the engines to compare; `problem` when they could not be reached."""

    sent: SentWeights | None = None
    problem: str = ""


class WeightSending:
    """Sends one backend's weights, again and again, to the receivers of one group."""

    def __init__(self, backend: TrainBackend, rollout: RolloutConfig) -> None:
        self._backend = backend
        self._dtype = full_dtype(rollout.dtype)
        self._weights_dtype = rollout.weights_dtype
        self._bucket_bytes = rollout.update_weights_bucket_megabytes * _MIB
        self._sender: WeightSender | None = None

    def open(self, num_receivers: int, host: str) -> GroupAddress | None:
        """A new group, on rank 0; its address is for the receivers. An older group is closed."""
        if self._backend.rank_info.rank != 0:
            return None
        self._close()
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

    def send(self, *, check: bool = False) -> SendResult:
        """All weights to all engines. Collective over the trainer's ranks, whatever happens to the engines.

        With `check`, a sample is hashed on the way.
        """
        source = GatheredWeights(self._backend.named_weights())
        if self._backend.rank_info.rank != 0:
            source.drain()
            return SendResult()
        if self._sender is None:
            source.drain()
            return SendResult(problem="the group for the weights is closed; engines must join a new one")
        watched = WatchedWeights(source, self._backend.hf_config, self._dtype) if check else None
        stream = in_engine_dtype(source if watched is None else watched, self._weights_dtype)
        try:
            self._sender.send(stream, self._bucket_bytes)
        except (RuntimeError, OSError) as error:
            self._close()
            if source.failed:
                raise
            source.drain()  # the other ranks are still gathering
            return SendResult(problem=f"{type(error).__name__}: {error}")
        return SendResult(None if watched is None else watched.sent())

    def _close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
