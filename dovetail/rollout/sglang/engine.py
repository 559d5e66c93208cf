"""SGLang (`rollout.name=sglang`): servers that this engine starts on loopback, and starts again when they die.

How servers are driven is in `dovetail.rollout.remote`; a server that was started again is one of those that came back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.controller.rendezvous import LOOPBACK
from dovetail.models.load import load_config
from dovetail.rollout.base import EngineDiedError, EngineError, ModelArgs, RolloutEngine
from dovetail.rollout.engine_settings import runs_on_cpu
from dovetail.rollout.remote.engine import RemoteRollout
from dovetail.rollout.remote.pool import NoServerError
from dovetail.rollout.remote.sglang_dialect import SGLangDialect
from dovetail.rollout.remote.weights import JoinedChannel
from dovetail.rollout.sglang.environment import GLOO_INTERFACE, server_python
from dovetail.rollout.sglang.server import SGLangServer
from dovetail.rollout.sglang.settings import SGLangSettings
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, GroupAddress

logger = logging.getLogger(__name__)

_SILENCE_S = 600.0
"""Our own processes are watched; one that is alive and silent is busy, for up to this long."""
_EXIT_S = 2.0
"""Connections break a moment before the process is gone, and only its end says why."""


class SGLangRollout(RemoteRollout):
    """`num_servers` servers of this machine share the requests. `python` has SGLang. `restarts` is how often dead
    servers are started again. `update_weights` goes through this machine's shared memory.
    """

    name = "sglang"
    on_trainer_devices = True
    owns_servers: ClassVar[bool] = True

    def __init__(
        self,
        settings: SGLangSettings,
        *,
        num_servers: int = 1,
        python: str | None = None,
        restarts: int = 0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        config = load_config(settings.model, **settings.model_args).get_text_config()
        # Said outright: a server is given some tokens more than the context, which it keeps free.
        self.settings = settings = replace(
            settings, max_model_len=int(settings.max_model_len or config.max_position_embeddings)
        )
        self.restarts_left = restarts
        self._restart_wanted = False
        """No server is left, and the requests that run wait for a new one."""
        self._restarting = threading.RLock()
        cpu = runs_on_cpu()
        self.frees_memory = not cpu and settings.enable_sleep
        program = server_python(python)
        servers: list[SGLangServer] = []
        try:
            for _ in range(num_servers):
                servers.append(SGLangServer(settings, python=program, cpu=cpu))
            for server in servers:
                server.wait_until_ready()
            self.servers = {server.url: server for server in servers}
            super().__init__(
                list(self.servers),
                settings.model,
                dialect="sglang",
                bucket_bytes=bucket_bytes,
                logprobs=settings.logprobs,
                max_model_len=settings.max_model_len,
                silence_s=_SILENCE_S,
                **settings.model_args,
            )
        except BaseException:
            for server in servers:
                server.close()
            raise
        assert isinstance(self._dialect, SGLangDialect), "asked for by name"
        self._sglang = self._dialect
        self._has_no_weights = settings.load_format == "dummy"
        if self._has_no_weights:
            self._updater.partial_update = "load_format=dummy loads none"
        if not settings.deterministic:
            logger.info("SGLang draws its own random numbers here: seeds of requests do not fix what is sampled.")

    @classmethod
    def from_config(
        cls, config: RolloutConfig, folder: str, *, device: torch.device, shared: Any = None, **model: Unpack[ModelArgs]
    ) -> RolloutEngine:
        """`num_servers` servers in every `rollout.mode`. SGLang always has weights of its own."""
        return cls(
            SGLangSettings.from_config(config, folder, device=device, **model),
            num_servers=config.num_servers,
            python=config.sglang_python,
            restarts=config.restart_engine,
            bucket_bytes=config.update_weights_bucket_megabytes * 1024**2,
        )

    @property
    def num_weight_ranks(self) -> int:
        """SGLang's model processes, over all servers."""
        return len(self.servers) * self.settings.tensor_parallel_size

    @property
    def deaths(self) -> list[str]:
        """Why servers are gone, of those that are."""
        return [server.death for server in self.servers.values() if server.death]

    def join_weight_group(self, address: GroupAddress, first_rank: int = 1) -> None:
        """SGLang's model processes join, on ranks from `first_rank` on, and leave what they were in."""
        last_rank = first_rank + self.num_weight_ranks - 1
        if not 1 <= first_rank <= last_rank < address.world_size:
            raise ValueError(
                f"ranks {first_rank} to {last_rank} of SGLang's processes are not all in a group of "
                f"{address.world_size}, whose rank 0 sends; open it for {self.num_weight_ranks} receivers more."
            )
        if address.backend == "gloo" and address.host != LOOPBACK and GLOO_INTERFACE not in os.environ:
            raise EngineError(
                f"the sender is at {address.host}, and SGLang's processes use gloo on the loopback interface; start "
                f"the engine with {GLOO_INTERFACE} naming the interface that leads there."
            )
        ranks = range(first_rank, last_rank + 1, self.settings.tensor_parallel_size)

        async def join() -> None:
            pairs = zip(self.servers, ranks, strict=True)
            await asyncio.gather(*(self._sglang.join_group(server, address, rank) for server, rank in pairs))

        self._run(join())

    def receive_weights(self, version: int) -> None:
        """After an update that does not fit, SGLang is no longer in the group: the sender waits for nobody."""
        if not self._closed:
            _kill(self._run(self._hanging(silence_s=_SILENCE_S)))  # they would never take what is sent
        if self.deaths and not self._closed:  # one that is started again would not be in the group
            raise EngineDiedError(self.deaths[0])
        if not all(map(self._sglang.in_group, self.servers)):
            raise EngineError("the engine is in no weight group, or was started again; call join_weight_group.")
        channel = JoinedChannel(self._sglang, self._loop, self._expected, bucket_bytes=0)
        self._updater.update((), version, stay_paused=self._paused, channel=channel)

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """When all servers are dead, they are started again here: the weights come from the caller's thread."""
        end = None if timeout is None else time.monotonic() + timeout
        while not done():
            super().wait(lambda: done() or self._restart_wanted, None if end is None else end - time.monotonic())
            if done() or (end is not None and time.monotonic() >= end):
                return
            if not self._restart_wanted:
                continue  # another thread that waits starts them
            self._restart_wanted = False
            try:
                self._bring_up_to_date()
            except EngineError as error:
                if not self._calls.is_open:
                    self._run(self._calls.fail(str(error)))
                raise
            finally:
                if not self._paused:
                    self._run(self._calls.open())

    def restart(self, error: EngineDiedError) -> None:
        """Start dead servers again, at the same addresses. They have none of the weights that were sent."""
        self._take_restart(error)
        dead = [server for server in self.servers.values() if server.death]

        async def take_out() -> None:  # in the event loop, whose tasks this cancels
            for server in dead:
                self._pool.mark_down(server.url, server.death)
                self._pool.forget_stall(server.url)

        async def put_back() -> None:
            for server in dead:
                self._pool.mark_up(server.url)

        self._run(take_out())
        for server in dead:
            self._sglang.restarted(server.url)
            server.start()
        for server in dead:
            server.wait_until_ready()
            if self._asleep and self.frees_memory:
                self._run(self._sglang.sleep(server.url, self._asleep))
        if self._needs_weights:
            self._updater.partial_update = "it was started again"
        else:
            self._run(put_back())

    def close(self) -> None:
        try:
            super().close()
        finally:
            for server in self.servers.values():
                server.close()

    def _update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Each rank of a trainer has servers of its own."""
        self._revive()
        self._updater.update(weights, version, stay_paused=self._paused)

    async def _no_server(self, error: EngineError) -> None:
        if not self._restarting.acquire(blocking=False):
            await asyncio.sleep(_EXIT_S)
            return  # another thread starts servers: until they are up, they fail their health checks as if they hung
        try:
            await self._ask_for_restart(error)
        finally:
            self._restarting.release()

    async def _ask_for_restart(self, error: EngineError) -> None:
        clock = asyncio.get_running_loop().time
        give_up = clock() + _EXIT_S
        while self._calls.is_open and not self.deaths and clock() < give_up:
            await asyncio.sleep(0.05)
        if not self._calls.is_open:
            return  # another sample has asked for the restart, or an update is under way
        if not self.deaths:
            if not isinstance(error, NoServerError):
                raise error
            hanging = await self._hanging(silence_s=0.0)
            if self._pool.up():
                return  # one is back
            if not hanging:
                raise error  # they wait for weights
            _kill(hanging)
        if not self._brings_weights_back:
            raise EngineDiedError("; ".join(self.deaths)) from error
        self._calls.is_open = False
        with self._progress:
            self._restart_wanted = True
            self._progress.notify_all()

    def _bring_up_to_date(self) -> None:
        with self._restarting:
            if self._brings_weights_back and self._revive() and self._needs_weights and self.reload_weights is not None:
                self.reload_weights(self)
        if len(self.deaths) == len(self.servers):
            raise EngineDiedError("; ".join(self.deaths))
        super()._bring_up_to_date()

    def _check_usable(self) -> None:
        with self._restarting:  # an engine that is being started again has no weights for a moment
            super()._check_usable()

    @property
    def _needs_weights(self) -> bool:
        return self._updater.has_updated or self._has_no_weights

    def _revive(self) -> bool:
        """Start servers again that died, or hang, while others went on."""
        with self._restarting:
            if self._closed or not self.restarts_left:
                return False
            _kill(self._run(self._hanging(silence_s=_SILENCE_S)))
            deaths = self.deaths
            if not deaths:
                return False
            self.restart(EngineDiedError(deaths[0]))
            return True

    async def _hanging(self, *, silence_s: float) -> dict[SGLangServer, str]:
        """Servers that are down because they hang, and what says so. Others are down for want of weights, or busy."""
        down = [server for server in self.servers.values() if server.url in self._pool.down() and not server.death]
        hangs = await asyncio.gather(*(self._pool.hangs(server.url, silence_s=silence_s) for server in down))
        reasons = self._pool.down()  # asked again: one may be back
        pairs = zip(down, hangs, strict=True)
        return {server: reasons[server.url] for server, hung in pairs if hung and server.url in reasons}


def _kill(hanging: Mapping[SGLangServer, str]) -> None:
    """Then they are servers that died."""
    for server, reason in hanging.items():
        server.kill(reason)
