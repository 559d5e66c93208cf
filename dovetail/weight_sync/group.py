"""A process group for weights, separate from the default group, whose failures do not end the process.

An engine may die at any moment, and the trainer must survive. So the host waits for a broadcast with a deadline, and a
group that failed is aborted: its communicator and connections are released at once.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from dovetail.controller.rendezvous import LOOPBACK
from dovetail.observability.waits import Wait, waiting

GroupBackend = Literal["gloo", "nccl"]
_SENDER = 0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.00005, 0.01
_SECONDS_BETWEEN_CHECKS = 0.2
# Read when a group is built. With it, NCCL's errors and time limits are raised by `wait`, and no watchdog thread is
# started; without it, that thread ends the whole process.
_NCCL_RAISES = {"TORCH_NCCL_BLOCKING_WAIT": "1"}


class GroupFailedError(RuntimeError):
    """A broadcast did not get through: a peer died, took too long, or the driver called it off."""


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """What a receiver needs to join; plain values, so it travels in any message. The sender is rank 0."""

    host: str
    port: int
    world_size: int
    backend: GroupBackend
    timeout_s: float

    @property
    def group_name(self) -> str:
        """What the group is called where a process may be in several."""
        return f"dovetail-weights-{self.port}"


class TransferGroup:
    """Builds the group, which blocks until every member is there (NCCL: until the first broadcast).

    `cancelled` says why a broadcast that is under way should be given up, or nothing.
    """

    def __init__(
        self, store: dist.Store, address: GroupAddress, rank: int, cancelled: Callable[[], str] = lambda: ""
    ) -> None:
        self._address = address
        self._rank = rank
        self._cancelled = cancelled
        # The keys of a group that torch makes under this name (SGLang's processes join so): its name twice, and the
        # first device that the backend serves.
        store = dist.PrefixStore(f"{address.group_name}/", dist.PrefixStore(address.group_name, store))
        store = dist.PrefixStore("cuda/" if address.backend == "nccl" else "cpu/", store)
        self._group: Any = BUILDERS[address.backend](store, address, rank)

    def broadcast(self, tensor: Tensor) -> None:
        """Send from rank 0, or receive into `tensor`; returns when the bytes are there. GroupFailedError otherwise."""
        if self._group is None:
            raise GroupFailedError("the group for the weights is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _SENDER, 0
        name, others, limit_s = self._address.group_name, self._address.world_size - 1, self._address.timeout_s
        what = f"the other {others} members of {name} to take part in a broadcast of weights"
        try:
            # The first broadcast of NCCL builds the communicator, in a call that takes no time limit: it is named then.
            with waiting(f"rank {self._rank}", what, limit_s=limit_s) as wait:
                work = self._group.broadcast([tensor], options)
                self._wait_for(work, wait)
                work.wait(timedelta(seconds=limit_s))
        except GroupFailedError:
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise GroupFailedError(str(error)) from error

    def close(self) -> None:
        """Leave without a handshake: members that still wait for this process get an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _wait_for(self, work: Any, wait: Wait) -> None:
        check_at, pause = time.monotonic() + _SECONDS_BETWEEN_CHECKS, _FIRST_POLL_S
        while not work.is_completed():
            if wait.is_over():
                raise GroupFailedError(str(wait))
            if (now := time.monotonic()) > check_at:
                check_at = now + _SECONDS_BETWEEN_CHECKS
                if reason := self._cancelled():
                    raise GroupFailedError(f"the broadcast of weights was called off: {reason}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)


def _build_nccl(store: dist.Store, address: GroupAddress, rank: int) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=address.timeout_s)
    with nccl_raises():
        return nccl(store, rank, address.world_size, options)


def _build_gloo(store: dist.Store, address: GroupAddress, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=address.timeout_s)
    is_here = rank == _SENDER or address.host == LOOPBACK
    own = address.host if is_here else address_towards(address.host, address.port)
    # Without a device of its own gloo resolves the host name, which need not be an address others reach.
    options._devices = [gloo.create_device(hostname=own)]
    return gloo(store, rank, address.world_size, options)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way there (no packet is sent)."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return probe.getsockname()[0]


BUILDERS: dict[str, Callable[[dist.Store, GroupAddress, int], Any]] = {"gloo": _build_gloo, "nccl": _build_nccl}
"""By backend: what makes a group of torch. A build of torch need not have both."""


@contextmanager
def nccl_raises() -> Iterator[None]:
    """NCCL groups built inside raise their errors; those of training, built elsewhere, keep their watchdog."""
    before = {name: os.environ.get(name) for name in _NCCL_RAISES}
    os.environ.update(_NCCL_RAISES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
