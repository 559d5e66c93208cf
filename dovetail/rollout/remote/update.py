"""One weight update over all servers: hold them, deliver, prove that it arrived, let them go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.rollout.expected import CheckedWeights
from dovetail.rollout.remote.calls import SampleCalls
from dovetail.rollout.remote.client import ServerError, ask_each
from dovetail.rollout.remote.dialect import ServerInfo, require_same_shape
from dovetail.rollout.remote.pool import ServerPool
from dovetail.rollout.remote.weights import Failures, WeightChannel
from dovetail.weight_sync import GatheredWeights, NamedTensors


class WeightUpdater:
    """`partial_update` says why the servers' weights cannot be used; empty when they are complete. `refusal` says why
    they take none.

    A server that is down during an update misses it, and may serve again only when it has caught up.
    """

    def __init__(self, pool: ServerPool, calls: SampleCalls, channel: WeightChannel, *, refusal: str) -> None:
        self._pool = pool
        self._calls = calls
        self._channel = channel
        self._dialect = channel.dialect
        self._loop = channel.loop
        self._refusal = refusal
        self._updating = asyncio.Lock()
        self.lock = threading.RLock()
        """Held while the servers are, by the thread that sends: others wait before they look at `partial_update`."""
        self.partial_update = ""
        self.has_updated = False
        self._num_failures_seen: int | None = None
        """How often servers of the pool had gone down when all were last asked for their version."""

    def update(
        self, weights: NamedTensors, version: int, *, stay_paused: bool, channel: WeightChannel | None = None
    ) -> None:
        """Blocking, on the thread of the caller: that is where the weights are. All of them are read, also when the
        update fails. `channel` takes the place of the one that was given at the start."""
        channel = channel or self._channel
        failed = f"the weight update to version {version} did not finish"
        with CheckedWeights(weights, channel.expected) as checked, contextlib.ExitStack() as held:
            if self._refusal:
                raise EngineError(self._refusal)
            try:
                channel.stage(checked, version)
                held.enter_context(self.lock)
                servers = self._loop.run(self._hold())
            except BaseException:
                self.partial_update = failed
                raise
            try:
                self.partial_update = failed
                if not servers:
                    down = (f"{server}: {reason}" for server, reason in self._pool.down().items())
                    raise EngineError(f"no server answers: {'; '.join(down)}")
                failures = channel.deliver(servers, checked)
                self._loop.run(self._prove(servers, failures, version))
                self.arrived(version)
            finally:
                self._loop.run(self._let_go(servers, stay_paused=stay_paused))

    def arrived(self, version: int) -> None:
        """The servers have this version, whoever sent it."""
        self._calls.version = version
        self._calls.must_match = self.has_updated = True
        self.partial_update = ""
        self._num_failures_seen = None

    async def take_out_forgetful(self) -> None:
        """Take out servers whose version is another than that of the last update: they were started again.

        They are asked after an update and after one of them went down. That saves tokens that would be thrown away:
        whoever is started again at another time is found out by what it writes.
        """
        if not self.has_updated or self._num_failures_seen == self._pool.num_failures:
            return
        servers = self._pool.up()
        for server, info in zip(servers, await ask_each(map(self._dialect.info, servers)), strict=True):
            if isinstance(info, ServerInfo) and info.weight_version != self._calls.version:
                self._pool.mark_down(server, _wrong_version(info, self._calls.version))
        self._num_failures_seen = self._pool.num_failures

    async def admit(self, server: str, folder: str, shape: Mapping[str, Any], *, paused: Callable[[], bool]) -> None:
        """A server is back: the same model, and the current weights, or it stays out (ServerError)."""
        async with self._updating:
            version = self._calls.version
            try:
                info = await self._dialect.info(server)
                require_same_shape(server, info.shape, shape, folder)
                is_current = not self.has_updated or info.weight_version == version
                if paused() or not is_current:
                    await self._dialect.pause(server)
                if not is_current:
                    is_current = await self._channel.catch_up(server, version)
                    if is_current:
                        await self._make_current(server, version)
                if not paused() and not self._refusal:  # asked again: the engine may have gone on meanwhile
                    # Also one that is current: it may have gone down before it answered the end of an update's pause.
                    await self._dialect.resume(server)
            except (EngineError, WeightUpdateError) as error:
                raise ServerError(str(error), url=server) from error
            if not is_current:
                raise ServerError(f"{_wrong_version(info, version)} The next update brings it back.", url=server)

    async def _hold(self) -> dict[str, ServerInfo]:
        """Stop all writing; the servers that answer, those among them that were down."""
        await self._updating.acquire()
        try:
            servers = self._pool.servers
            await self._calls.shut(self._pool.up())
            infos = dict(zip(servers, await ask_each(map(self._dialect.info, servers)), strict=True))
            for server, info in infos.items():
                if isinstance(info, ServerError):
                    self._pool.mark_down(server, str(info))
            return {server: info for server, info in infos.items() if isinstance(info, ServerInfo)}
        except BaseException:
            self._updating.release()
            raise

    async def _prove(self, servers: Mapping[str, ServerInfo], failures: Failures, version: int) -> None:
        """Caches forgotten, version set and read back; servers that died on the way are taken out."""
        for server, error in failures.items():
            problem = None if isinstance(error, WeightUpdateError) else await self._pool.health_problem(server)
            if problem is None:
                raise error
            self._pool.mark_down(server, str(error))
        good = [server for server in servers if server not in failures]
        if not good:
            raise EngineError("no server took the weights: all of them died meanwhile.")
        await asyncio.gather(*(self._make_current(server, version) for server in good))
        for server in good:
            self._pool.mark_up(server)

    async def _make_current(self, server: str, version: int) -> None:
        await self._dialect.forget_caches(server)
        await self._dialect.set_version(server, version)
        info = await self._dialect.info(server)
        if info.weight_version != version:
            raise EngineError(f"after an update to version {version}, {server} says: {_wrong_version(info, version)}")

    async def _let_go(self, servers: Mapping[str, ServerInfo], *, stay_paused: bool) -> None:
        try:
            if self.partial_update:
                await self._calls.fail(self.partial_update)
            if not stay_paused:
                await self.resume(servers)
        finally:
            self._updating.release()

    async def resume(self, servers: Iterable[str]) -> None:
        """Let those of these servers that are up generate again; one that does not answer is taken out."""
        up = [server for server in servers if server in self._pool.up()]
        for server, answer in zip(up, await ask_each(map(self._dialect.resume, up)), strict=True):
            if isinstance(answer, ServerError):
                self._pool.mark_down(server, str(answer))
        await self._calls.open()


def on_first_rank(weights: NamedTensors, act: Callable[[NamedTensors], None]) -> None:
    """`act(weights)` on rank 0 of the trainer's world, while the others take their tensors and wait for its outcome.

    An error of rank 0 is raised on every rank, so that none goes on with servers that have other weights.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        act(weights)
        return
    # Ranks must enter the gather together: if rank 0 pauses the servers first, another rank may still be waiting for
    # their responses, and both deadlock.
    dist.barrier()
    stream = GatheredWeights(weights)
    failure: BaseException | None = None
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            act(stream)
        except BaseException as error:  # noqa: BLE001  sent to the other ranks, then raised here
            failure = error
            outcome[0] = f"{type(error).__name__}: {error}"
    # Gathering is collective: every rank takes every tensor, rank 0 also those that its error has left.
    stream.drain()
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[0] is not None:
        raise EngineError(f"the first process could not update the servers' weights: {outcome[0]}")


def _wrong_version(info: ServerInfo, version: int) -> str:
    if info.weight_version is None:
        return f"it has the weights it was started with, not version {version}."
    return f"its weights are version {info.weight_version}, not {version}."
