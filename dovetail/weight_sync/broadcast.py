"""Send weights from one trainer rank to every engine worker over a process group of their own (gloo or NCCL).

The sender binds a free port and serves the rendezvous on that very socket, so no port is ever guessed. Everything
travels in the group itself: a bucket is announced by its table of contents, the end of an update by an empty one, and
a source that fails says so, so that no receiver waits for what will never come.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, entries_of, iter_buckets
from dovetail.weight_sync.protocols import NamedTensors

GroupBackend = Literal["gloo", "nccl"]
_Group: TypeAlias = Any  # ProcessGroupGloo or ProcessGroupNCCL; a build of torch need not have both
LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT_S = 300.0
_END, _BUCKET, _FAILED = 0, 1, 2
_SENDER = 0


class BroadcastFailedError(RuntimeError):
    """The sender's source raised in the middle of an update; what was received is incomplete."""


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """What a receiver needs to join; plain values, so it travels in any message. The sender is rank 0."""

    host: str
    port: int
    world_size: int
    backend: GroupBackend
    timeout_s: float


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
        self._store, port = serve_store(host, timeout_s)
        self.address = GroupAddress(host, port, num_receivers + 1, backend, timeout_s)
        self._group: _Group = None

    def connect(self) -> None:
        """Blocks until every receiver has joined."""
        if self._group is None:
            self._group = _build_group(self._store, self.address, _SENDER)

    def send(self, weights: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """Send all of `weights`. An error of the source is raised here and, in words, at every receiver."""
        self.connect()
        try:
            for bucket in iter_buckets(weights, bucket_bytes):
                self._announce(_BUCKET, bucket.header())
                self._broadcast(bucket.buffer[: bucket.num_bytes].to(self._device))
        except dist.DistBackendError:
            raise  # the group itself is broken: nothing can be announced any more
        except Exception as error:
            self._announce(_FAILED, f"{type(error).__name__}: {error}".encode())
            raise
        self._announce(_END, b"")

    def close(self) -> None:
        """Leave the group: a receiver that still waits for it gets an error."""
        self._group = None

    def _announce(self, kind: int, payload: bytes) -> None:
        self._broadcast(torch.tensor([kind, len(payload)], dtype=torch.int64, device=self._device))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device))

    def _broadcast(self, tensor: Tensor) -> None:
        assert self._group is not None, "connect() builds the group"
        broadcast_tensor(self._group, tensor)


class WeightReceiver:
    """One engine worker. Joining blocks until the whole group is there."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device | str = "cpu") -> None:
        if not 0 < rank < address.world_size:
            raise ValueError(f"rank={rank} of a receiver must lie between 1 and {address.world_size - 1}.")
        self._device = torch.device(device)
        timeout = timedelta(seconds=address.timeout_s)
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        self._group = _build_group(store, address, rank)

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of one update, each in memory of its own: a loader may keep tensors of earlier ones."""
        while True:
            kind, length = self._receive(2, torch.int64).tolist()
            if kind == _END:
                return
            payload = bytes(self._receive(length, torch.uint8).cpu().numpy())
            if kind == _FAILED:
                raise BroadcastFailedError(f"the sender stopped in the middle of an update: {payload.decode()}")
            entries = entries_of(payload)
            num_bytes = Bucket(entries, torch.empty(0)).num_bytes
            yield Bucket(entries, self._receive(num_bytes, torch.uint8))

    def _receive(self, size: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        broadcast_tensor(self._group, tensor)
        return tensor


def broadcast_tensor(group: _Group, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = _SENDER, 0
    group.broadcast([tensor], options).wait()


def serve_store(host: str, timeout_s: float) -> tuple[dist.Store, int]:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(512)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _build_group(store: dist.Store, address: GroupAddress, rank: int) -> _Group:
    """A group beside the default one: trainer and engines each have a world of their own already."""
    timeout = timedelta(seconds=address.timeout_s)
    store = dist.PrefixStore("dovetail-weights", store)
    if address.backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, address.world_size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # Without a device of its own gloo resolves the host name, which need not be an address others reach.
    local = address.host if rank == _SENDER or address.host == LOOPBACK else _address_towards(address)
    options._devices = [gloo.create_device(hostname=local)]
    return gloo(store, rank, address.world_size, options)


def _address_towards(address: GroupAddress) -> str:
    """This machine's own address on the way to the sender (no packet is sent)."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        return probe.getsockname()[0]
