"""How weights reach servers: a folder that all see, a broadcast group, shared memory. Blocking; decides nothing else.

A channel takes a stream in two steps: `stage` before the servers are held, `deliver` while they are. What goes wrong on
one server is returned, not raised: the others may be fine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import torch

from dovetail.controller.rendezvous import LOOPBACK
from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.remote.client import ServerError
from dovetail.rollout.remote.dialect import Dialect, ServerInfo
from dovetail.weight_sync import (
    BroadcastFailedError,
    Bucket,
    ExpectedWeights,
    NamedTensors,
    WeightSender,
    shared_memory_buckets,
    write_version,
)
from dovetail.weight_sync.group import GroupBackend, address_towards

logger = logging.getLogger(__name__)

Failures: TypeAlias = dict[str, Exception]
"""What went wrong, by server."""
_ANYWHERE_PORT = 9  # for a datagram that is never sent


@dataclass
class WeightChannel(ABC):
    dialect: Dialect
    loop: LoopThread
    expected: ExpectedWeights
    bucket_bytes: int

    def stage(self, weights: NamedTensors, version: int) -> None:  # noqa: B027  only a folder is written before
        """What can be done before the servers are held. The stream raises WeightUpdateError at its end for a misfit."""

    @abstractmethod
    def deliver(self, servers: Mapping[str, ServerInfo], weights: NamedTensors) -> Failures:
        """Bring the weights to these servers, which are paused; `stage` may have read them already."""

    async def catch_up(self, server: str, version: int) -> bool:
        """Give `version` to one server that missed it; False if that is not possible."""
        return False

    async def _begin(self, server: str) -> None:
        await self.dialect.begin_update(server, self.expected)

    async def _on_each(self, servers: Iterable[str], call: Callable[[str], Awaitable[str | None]]) -> Failures:
        """Call every server at once; a misfit comes back in words."""
        names = list(servers)
        outcomes = await asyncio.gather(*(call(server) for server in names), return_exceptions=True)
        failures: Failures = {}
        for server, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, str):
                failures[server] = WeightUpdateError(f"{server}: {outcome}")
            elif isinstance(outcome, (ServerError, WeightUpdateError, BroadcastFailedError)):
                failures[server] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failures


@dataclass
class DiskChannel(WeightChannel):
    """Writes complete versions into `folder`. Servers must see it under the same path."""

    folder: str
    _saved: tuple[int, Path] | None = field(default=None, init=False)

    def stage(self, weights: NamedTensors, version: int) -> None:
        self._saved = None
        self._saved = version, write_version(self.folder, weights, version, bucket_bytes=self.bucket_bytes)

    def deliver(self, servers: Mapping[str, ServerInfo], weights: NamedTensors) -> Failures:
        return self.loop.run(self._on_each(servers, self._load))

    async def catch_up(self, server: str, version: int) -> bool:
        if self._saved is None or self._saved[0] != version:
            return False
        await self._load(server)
        return True

    async def _load(self, server: str) -> None:
        assert self._saved is not None, "stage() comes first"
        await self.dialect.load_from_disk(server, self._saved[1], self.expected)


class SharedMemoryChannel(WeightChannel):
    """Buckets in this machine's shared memory, which servers on this machine map."""

    def deliver(self, servers: Mapping[str, ServerInfo], weights: NamedTensors) -> Failures:
        failures = self.loop.run(self._on_each(servers, self._begin))
        for path in shared_memory_buckets(weights, self.bucket_bytes, save_tensors):
            left = [server for server in servers if server not in failures]
            failures |= self.loop.run(self._on_each(left, partial(self.dialect.load_file, path=path)))
        return failures


class JoinedChannel(WeightChannel):
    """A group whose sender is a trainer. The servers have joined it and receive from it, past this process."""

    def deliver(self, servers: Mapping[str, ServerInfo], weights: NamedTensors) -> Failures:
        failures = self.loop.run(self._on_each(servers, self._begin))
        alive = {server: info.num_workers for server, info in servers.items() if server not in failures}
        if not alive:
            return failures
        self._join(alive)
        receiving = self.loop.start(self._on_each(alive, self.dialect.receive))
        broken = self._send(weights)
        received = receiving.result()
        # Also after a failure: a server that is left in the middle of an update cannot begin another.
        missing = self.loop.run(self._on_each(alive, self.dialect.finish_update))
        if broken is not None:
            lost = "; ".join(str(failure) for failure in received.values() if isinstance(failure, ServerError))
            if not lost or isinstance(broken, WeightUpdateError):
                raise broken
            raise EngineError(
                f"the broadcast of weights broke off ({broken}): {lost}. The next update builds the group anew; "
                "rollout.weight_sync=disk needs no group."
            ) from broken
        # What did not fit comes before what is missing because of it.
        return missing | failures | received

    def _join(self, members: dict[str, int]) -> None:
        """Bring these servers into the group, each with so many workers."""

    def _send(self, weights: NamedTensors) -> Exception | None:
        """Send, while the servers receive; what the source or the group raised."""


@dataclass
class GroupChannel(JoinedChannel):
    """One `WeightSender` here, and every worker of every server. The group is built anew when servers come or go."""

    backend: GroupBackend
    device: torch.device
    _sender: WeightSender | None = field(default=None, init=False)
    _members: dict[str, int] = field(default_factory=dict, init=False)

    def deliver(self, servers: Mapping[str, ServerInfo], weights: NamedTensors) -> Failures:
        try:
            return super().deliver(servers, weights)
        except BaseException:
            self._close()  # nobody goes on waiting for it
            raise

    def _send(self, weights: NamedTensors) -> Exception | None:
        assert self._sender is not None, "the servers have joined"
        try:
            self._sender.send(weights, self.bucket_bytes)
        except Exception as error:  # noqa: BLE001  raised again when the servers have left the update
            # The frames hold the group, which must close now, so that no receiver waits any longer.
            traceback.clear_frames(error.__traceback__)
            self._close()
            return error
        return None

    def _close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _join(self, members: dict[str, int]) -> None:
        if self._sender is not None and members == self._members:
            return
        self._close()
        # From here on `deliver` closes it, whatever goes wrong.
        self._sender = sender = WeightSender(
            sum(members.values()), host=own_address(members), backend=self.backend, device=self.device
        )
        first_ranks, rank = {}, 1
        for server, num_workers in members.items():
            first_ranks[server] = rank
            rank += num_workers

        async def join(server: str) -> None:
            await self.dialect.join_group(server, sender.address, first_ranks[server])

        # Joining answers when the group is complete, so this side connects meanwhile.
        connecting = threading.Thread(target=_connect_quietly, args=(sender.connect,), daemon=True)
        connecting.start()
        failures = self.loop.run(self._on_each(members, join))
        if failures:
            raise EngineError(f"a group for the weights could not be built: {'; '.join(map(str, failures.values()))}")
        connecting.join()
        self._members = dict(members)


def _connect_quietly(connect: Callable[[], None]) -> None:
    """On a thread beside the calls that make the servers join: those say what went wrong."""
    try:
        connect()
    except RuntimeError as error:
        logger.warning("the group for the weights is not complete: %s", error)


def save_tensors(bucket: Bucket, path: Path) -> None:
    """In the form that `Dialect.load_file` reads."""
    torch.save(list(bucket.on_host().items()), path)


def own_address(servers: Iterable[str]) -> str:
    """This machine's address as the servers see it: loopback only if all of them are here."""
    for server in servers:
        parts = urlsplit(server)
        own = address_towards(parts.hostname or LOOPBACK, parts.port or _ANYWHERE_PORT)
        if not own.startswith("127.") and own != "::1":
            return own
    return LOOPBACK
