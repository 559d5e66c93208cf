"""Send weights from one trainer rank to every engine worker over a process group of their own (gloo or NCCL).

The sender binds a free port and serves the rendezvous store on that socket: no port is ever guessed. The group carries
only bytes of weights, so processes that can only "receive these tensors" (SGLang's) can join it. The table of contents
of each bucket is announced in the store. A sender that fails announces that too, so no receiver waits forever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.controller.rendezvous import LOOPBACK, open_store
from dovetail.observability.waits import waiting
from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, BucketEntry, entries_of, iter_buckets
from dovetail.weight_sync.group import GroupAddress, GroupBackend, GroupFailedError, TransferGroup
from dovetail.weight_sync.stream import NamedTensors

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 300.0
_MORE, _LAST, _FAILED = "m", "l", "f"  # a bucket, the last bucket of an update, no more buckets
_SENDER = 0
_BOARD, _ALL_READ, _CANCELLED = "announcements", "all_read", "cancelled"
_CANCEL_TIMEOUT_S = 10.0
_LINGER_S = 10.0
_POLL_S = 0.002


class BroadcastFailedError(RuntimeError):
    """The sender's source raised in the middle of an update; what was received is incomplete."""


class WeightSender:
    """Rank 0. Build it, hand `address` to the receivers, then `connect` while they join."""

    def __init__(
        self,
        num_receivers: int,
        *,
        host: str = LOOPBACK,
        backend: GroupBackend = "gloo",
        device: torch.device | str = "cpu",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if num_receivers < 1:
            raise ValueError(f"num_receivers={num_receivers}: a broadcast needs somebody to receive it.")
        self._device = torch.device(device)
        self._store, port = open_store(host, timedelta(seconds=timeout_s))
        self._board = dist.PrefixStore(_BOARD, self._store)
        self._num_announced = 0
        self.address = GroupAddress(host, port, num_receivers + 1, backend, timeout_s)
        self._group: TransferGroup | None = None
        self._closed = False
        self._changing = threading.Lock()  # `close` may come while another thread connects

    def connect(self) -> None:
        """Blocks until every receiver has joined (NCCL: until the first update)."""
        if self._group is not None:
            return
        group = TransferGroup(self._store, self.address, _SENDER, self._why_cancelled)
        with self._changing:
            if not self._closed:
                self._group = group
                return
        group.close()
        raise GroupFailedError("the sender was closed before every receiver had joined")

    def send(self, weights: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """Send all of `weights`. An error of the source is raised here and, in words, at every receiver."""
        self.connect()
        assert self._group is not None, "connected"
        source = _Source(weights)
        try:
            for bucket in iter_buckets(source, bucket_bytes):
                self._announce((_LAST if source.exhausted else _MORE) + bucket.header().decode())
                for _, run in bucket.runs():
                    self._group.broadcast(run.to(self._device))
        except Exception as error:
            self._announce(f"{_FAILED}{type(error).__name__}: {error}")
            raise
        if source.empty:
            self._announce(_LAST + "[]")
        self._linger()

    def close(self) -> None:
        """Leave the group: a receiver that still waits for it gets an error. The rendezvous ends with this object."""
        with self._changing:
            group, self._group = self._group, None
            was_closed, self._closed = self._closed, True
        if not was_closed:  # also without a group: receivers may know it to be complete before this side does
            self._announce(_FAILED + "it left the group")
        if group is not None:
            group.close()

    def _why_cancelled(self) -> str:
        return self._board.get(_CANCELLED).decode() if self._board.check([_CANCELLED]) else ""

    def _announce(self, message: str) -> None:
        self._board.set(str(self._num_announced), message)
        self._num_announced += 1

    def _linger(self) -> None:
        """Wait until all receivers have read the announcements: the store ends with this process. Small weights fit in
        socket buffers, so a send may finish before receivers have started to read."""
        deadline = time.monotonic() + _LINGER_S
        while self._board.add(_ALL_READ, 0) < self._num_announced and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class _Source:
    """Knows whether it has given its last tensor when the bucket with that tensor is sent."""

    def __init__(self, weights: NamedTensors) -> None:
        self._weights = weights
        self.empty = True
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._weights:
            self.empty = False
            yield item
        self.exhausted = True


class Announcements:
    """What a sender says of its updates, for one reader that stands for `num_ranks` of the receivers."""

    def __init__(self, address: GroupAddress, num_ranks: int = 1) -> None:
        timeout = timedelta(seconds=address.timeout_s)
        # A connection of its own: a reader that waits holds it, and the group may want to use its.
        self._store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        self._board = dist.PrefixStore(_BOARD, self._store)
        self._num_ranks = num_ranks
        self._num_receivers = address.world_size - 1
        self._sender = f"the sender of weights at {address.host}:{address.port}"
        self._timeout_s = address.timeout_s
        self._num_read = 0

    def update(self) -> Iterator[tuple[BucketEntry, ...]]:
        """The table of contents of each bucket of one update, as they are sent."""
        while True:
            kind, payload = self._next()
            if kind == _FAILED:
                raise BroadcastFailedError(f"the sender stopped in the middle of an update: {payload}")
            if entries := entries_of(payload.encode()):
                yield entries
            if kind == _LAST:
                return

    def _next(self) -> tuple[str, str]:
        key = str(self._num_read)
        with waiting("a receiver", f"{self._sender} to announce bucket {key}", limit_s=self._timeout_s) as wait:
            try:
                message = self._board.get(key).decode()
            except RuntimeError as error:  # the store's time limit, or its end
                raise BroadcastFailedError(f"{wait}: {error}") from error
        self._num_read += 1
        if self._board.add(f"{key}/read", self._num_ranks) == self._num_receivers:  # all have: it has done its work
            self._board.delete_key(key)
            self._board.delete_key(f"{key}/read")
            self._board.add(_ALL_READ, 1)
        return message[:1], message[1:]


class WeightReceiver:
    """One engine worker. Joining blocks until the whole group is there."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device | str = "cpu") -> None:
        if not 0 < rank < address.world_size:
            raise ValueError(f"rank={rank} of a receiver must lie between 1 and {address.world_size - 1}.")
        self._device = torch.device(device)
        timeout = timedelta(seconds=address.timeout_s)
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        self._announcements = Announcements(address)
        self._group = TransferGroup(store, address, rank)

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of one update, each in memory of its own: a loader may keep tensors of earlier ones."""
        for entries in self._announcements.update():
            num_bytes = Bucket(entries, torch.empty(0)).num_bytes
            bucket = Bucket(entries, torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
            for _, run in bucket.runs():
                self._group.broadcast(run)
            yield bucket

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def cancel_broadcast(address: GroupAddress, reason: str) -> None:
    """Make the sender abort: NCCL does not notice by itself that a receiver is dead.

    For a process outside the group that knows of the death. Does nothing if the sender is gone.
    """
    timeout = timedelta(seconds=_CANCEL_TIMEOUT_S)
    try:
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        dist.PrefixStore(_BOARD, store).set(_CANCELLED, reason)
    except RuntimeError as error:
        logger.info("the sender of weights at %s:%d is not there: %s", address.host, address.port, error)
