"""SGLang (`rollout.name=sglang`): servers that this engine starts on loopback, and starts again when they die.

How servers are driven is in `dovetail.rollout.remote`; a server that was started again is one of those that came back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import EngineDiedError, EngineError, GenerationResult, RolloutEngine
from dovetail.rollout.engine_settings import runs_on_cpu
from dovetail.rollout.expected import read_config
from dovetail.rollout.remote.client import ServerGoneError
from dovetail.rollout.remote.engine import RemoteRollout
from dovetail.rollout.remote.router import NoServerError
from dovetail.rollout.remote.samples import RemoteSample
from dovetail.rollout.remote.sglang_dialect import SGLangDialect
from dovetail.rollout.remote.weights import JoinedChannel
from dovetail.rollout.sglang.environment import GLOO_INTERFACE, server_python
from dovetail.rollout.sglang.server import SGLangServer
from dovetail.rollout.sglang.settings import SGLangSettings
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, GroupAddress
from dovetail.weight_sync.broadcast import LOOPBACK

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
        config = read_config(
            settings.model, settings.override_config, trust_remote_code=settings.trust_remote_code
        ).get_text_config()
        # Said outright: a server is given some tokens more than the context, which it keeps free.
        self.settings = settings = replace(
            settings, max_model_len=int(settings.max_model_len or config.max_position_embeddings)
        )
        self.restarts_left = restarts
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
                trust_remote_code=settings.trust_remote_code,
                override_config=settings.override_config,
            )
        except BaseException:
            for server in servers:
                server.close()
            raise
        assert isinstance(self._dialect, SGLangDialect), "asked for by name"
        self._sglang = self._dialect
        self._has_no_weights = settings.load_format == "dummy"
        if self._has_no_weights:
            self._updater.gap = "load_format=dummy loads none"
        if not settings.deterministic:
            logger.info("SGLang draws its own random numbers here: seeds of requests do not fix what is sampled.")

    @classmethod
    def from_config(
        cls,
        config: RolloutConfig,
        folder: str,
        *,
        device: torch.device,
        shared: torch.nn.Module | None = None,
        trust_remote_code: bool = False,
        override_config: Mapping[str, Any] | None = None,
    ) -> RolloutEngine:
        """`num_servers` servers in every `rollout.mode`. SGLang always has weights of its own."""
        return cls(
            SGLangSettings.from_config(
                config,
                folder,
                device=device,
                trust_remote_code=trust_remote_code,
                override_config=override_config,
            ),
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
        pairs = zip(self.servers, ranks, strict=True)
        self._run(self._gathered(self._sglang.join_group(server, address, rank) for server, rank in pairs))

    def receive_weights(self, version: int) -> None:
        """After an update that does not fit, SGLang is no longer in the group: the sender waits for nobody."""
        if self.deaths and not self._closed:  # one that is started again would not be in the group
            raise EngineDiedError(self.deaths[0])
        if not all(map(self._sglang.in_group, self.servers)):
            raise EngineError("the engine is in no weight group, or was started again; call join_weight_group.")
        channel = JoinedChannel(self._sglang, self._loop, self._expected, bucket_bytes=0)
        self._updater.update(self._loop, (), version, stay_paused=self._paused, channel=channel)

    def restart(self, error: EngineDiedError) -> None:
        """Start dead servers again, at the same addresses. They have none of the weights that were sent."""
        if self.restarts_left <= 0:
            raise error
        self.restarts_left -= 1
        self.num_restarts += 1
        logger.warning("%s Starting it again; %d restarts are left.", error, self.restarts_left)
        dead = [server for server in self.servers.values() if server.death]
        for server in dead:
            self._pool.mark_down(server.url, server.death)
            self._sglang.restarted(server.url)
            server.start()
        for server in dead:
            server.wait_until_ready()
            if self._asleep and self.frees_memory:
                self._run(self._sglang.sleep(server.url, self._asleep))
        if self._needs_weights:
            self._updater.gap = "it was started again"
        else:
            for server in dead:
                self._pool.router.mark_up(server.url)

    def close(self) -> None:
        try:
            super().close()
        finally:
            for server in self.servers.values():
                server.close()

    def _update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Each rank of a trainer has servers of its own."""
        self._revive()
        self._updater.update(self._loop, weights, version, stay_paused=self._paused)

    def _finish(self, samples: Sequence[RemoteSample]) -> None:
        """After a death, what is finished stays finished, and what is begun is continued."""
        while unfinished := [sample for sample in samples if sample.finish_reason is None]:
            try:
                self._run(self._calls.finish(unfinished))
            except (NoServerError, ServerGoneError) as error:
                reason = self._why_dead()
                if not reason:
                    raise EngineError(str(error)) from error
                death = EngineDiedError(reason, _complete(samples))
                if not self._brings_weights_back:
                    raise death from error
                self.restart(death)
                self._reload()

    def _bring_up_to_date(self) -> None:
        if self._brings_weights_back and self._revive():
            self._reload()
        if len(self.deaths) == len(self.servers):
            raise EngineDiedError("; ".join(self.deaths))
        super()._bring_up_to_date()

    def _reload(self) -> None:
        if self._needs_weights and self.reload_weights is not None:
            self.reload_weights(self)

    @property
    def _needs_weights(self) -> bool:
        return self._updater.has_updated or self._has_no_weights

    @property
    def _brings_weights_back(self) -> bool:
        """Whether this engine can be restarted without help: it may, and finds the weights it had."""
        return self.restarts_left > 0 and (not self._needs_weights or self.reload_weights is not None)

    def _revive(self) -> bool:
        """Between batches: start servers again that died while others went on."""
        deaths = self.deaths
        if self._closed or not deaths or not self.restarts_left:
            return False
        self.restart(EngineDiedError(deaths[0]))
        return True

    def _why_dead(self) -> str:
        give_up = time.monotonic() + _EXIT_S
        while not self.deaths and time.monotonic() < give_up:
            time.sleep(0.05)
        return "; ".join(self.deaths)


def _complete(samples: Sequence[RemoteSample]) -> dict[str, list[GenerationResult]]:
    """The requests all of whose samples are finished, by their id."""
    unfinished = {sample.request.request_id for sample in samples if sample.finish_reason is None}
    results: dict[str, list[GenerationResult]] = {}
    for sample in samples:
        if sample.request.request_id not in unfinished:
            results.setdefault(sample.request.request_id, []).append(sample.result())
    return results
