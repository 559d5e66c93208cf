"""SGLang (`rollout.name=sglang`): inside this process, a batch or a request at a time, or as servers over HTTP.

Every weight update finds the engine idle, is checked tensor by tensor before SGLang sees it, carries a version and is
followed by a flush of the radix cache; running requests are interrupted and go on under the new weights. Sampling is
SGLang's own; log-probs mean what `dovetail.rollout.base` says, or the request is refused.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import (
    ALL_TAGS,
    EngineDiedError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    MemoryTag,
    RolloutEngine,
    UnsupportedPromptError,
)
from dovetail.rollout.engine_settings import runs_on_cpu
from dovetail.rollout.readiness import check_tags
from dovetail.rollout.remote.client import HttpClient
from dovetail.rollout.remote.loop import LoopThread
from dovetail.rollout.sglang.core import Core
from dovetail.rollout.sglang.environment import server_python
from dovetail.rollout.sglang.expected import expected_weights
from dovetail.rollout.sglang.in_process import InProcessLink
from dovetail.rollout.sglang.link import SGLangLink
from dovetail.rollout.sglang.samples import Sample, check_request, samples_of
from dovetail.rollout.sglang.server import ServerLink
from dovetail.rollout.sglang.settings import Level, SGLangSettings
from dovetail.rollout.sglang.updates import WeightUpdates
from dovetail.rollout.vllm.expected import read_config, stop_token_ids
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, DiskVersion, GroupAddress, NamedTensors
from dovetail.weight_sync.group import GroupBackend

logger = logging.getLogger(__name__)

_GIB = 1024**3


class SGLangRollout(RolloutEngine):
    """`num_servers=0` runs SGLang in this process (build it on the main thread), otherwise that many servers of this
    machine share the requests. `restarts` is how often dead ones are started again. `python` has SGLang for servers.
    """

    name = "sglang"

    def __init__(
        self,
        settings: SGLangSettings,
        *,
        num_servers: int = 0,
        level: Level = "request",
        python: str | None = None,
        restarts: int = 0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._cpu = runs_on_cpu()
        self._num_servers = num_servers
        self._python = server_python(python) if num_servers else ""
        self.restarts_left = restarts
        self._expected = expected_weights(
            settings.model, settings.override_config, trust_remote_code=settings.trust_remote_code
        )
        self._eos_ids = stop_token_ids(settings.model, trust_remote_code=settings.trust_remote_code)
        text = read_config(
            settings.model, settings.override_config, trust_remote_code=settings.trust_remote_code
        ).get_text_config()
        self._vocab_size = int(text.vocab_size)
        self._max_model_len = int(settings.max_model_len or text.max_position_embeddings)
        self.settings = replace(settings, max_model_len=self._max_model_len)
        self._unloaded = "load_format=dummy loads none" if settings.load_format == "dummy" else ""
        self._kv_cache_bytes = 0
        self._serial = itertools.count()
        self._loop = LoopThread("sglang-engine")
        self._client = HttpClient()
        try:
            links = self._start_links(max(num_servers, 1))
        except BaseException:
            self._loop.run(self._client.close())
            self._loop.close()
            raise
        self._core = self._loop.run(self._build_core(links, level))
        self._updates = WeightUpdates(
            self._core,
            self._loop,
            self._expected,
            num_instances=len(links),
            workers_each=settings.tensor_parallel_size,
            bucket_bytes=bucket_bytes,
            revive=self._revive,
        )
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
        """`mode=sync` is one call per batch and `mode=async` one per sample, both in this process; `mode=server` starts
        `num_servers` servers. SGLang always has weights of its own."""
        return cls(
            SGLangSettings.from_config(
                config,
                folder,
                device=device,
                trust_remote_code=trust_remote_code,
                override_config=override_config,
            ),
            num_servers=config.num_servers if config.mode == "server" else 0,
            level="batch" if config.mode == "sync" else "request",
            python=config.sglang_python,
            restarts=config.restart_engine,
            bucket_bytes=config.update_weights_bucket_megabytes * 1024**2,
        )

    @property
    def weight_version(self) -> int:
        return self._core.version

    @property
    def frees_memory(self) -> bool:
        """Whether `sleep` gives memory back. On CPU SGLang has no way to, and sleep only guards against use."""
        return not self._cpu and self.settings.enable_sleep

    @property
    def num_workers(self) -> int:
        """Processes that hold the model, over all servers."""
        return max(self._num_servers, 1) * self.settings.tensor_parallel_size

    @property
    def num_weight_ranks(self) -> int:
        return self.num_workers

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self._check_requests(requests)
        samples = [
            sample
            for request in requests
            for sample in samples_of(
                request,
                next(self._serial),
                eos_ids=self._eos_ids,
                room=self._max_model_len - len(request.prompt_token_ids),
            )
        ]
        if self._brings_weights_back and self._revive() and self._needs_weights and self.reload_weights is not None:
            self.reload_weights(self)
        while unfinished := [sample for sample in samples if sample.finish_reason is None]:
            try:
                self._loop.run(self._core.finish(unfinished))
            except EngineDiedError as error:
                if not self._brings_weights_back:
                    raise EngineDiedError(str(error), _complete(samples)) from error
                self.restart(error)
                if self._needs_weights and self.reload_weights is not None:
                    self.reload_weights(self)
        return [sample.result() for sample in samples]

    def num_tokens(self) -> dict[str, int]:
        """Tokens that calls which have ended wrote of each running request. SGLang tells no more before a call ends."""
        counts: Counter[str] = Counter()
        for sample in list(self._core.live.values()):
            counts[sample.request.request_id] += len(sample.token_ids)
        return dict(counts)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        """Through shared memory: the source is on this machine, and so are the servers."""
        if weights is None:
            raise ValueError("update_weights(None) is for engines that share the trainer's memory; SGLang has its own.")
        self._updates.through_shared_memory(weights, version)

    def update_weights_by_broadcast(
        self, weights: NamedTensors, version: int, *, backend: GroupBackend = "gloo", device: torch.device | str = "cpu"
    ) -> None:
        """Over a process group that SGLang's model processes join at the first call."""
        self._updates.by_broadcast(weights, version, backend=backend, device=device)

    def join_weight_group(self, address: GroupAddress, first_rank: int = 1) -> None:
        """SGLang's model processes join, as `num_workers` ranks from `first_rank` on, and leave what they were in."""
        self._updates.join(address, first_rank)

    def receive_weights(self, version: int) -> None:
        """After an update that does not fit, SGLang is no longer in the group: the sender waits for nobody."""
        self._updates.receive(version)

    def update_weights_from_disk(self, found: DiskVersion) -> None:
        """From a folder that SGLang's processes see."""
        self._updates.from_disk(found)

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        """Of a few small tensors, of model families that SGLang can read back (Llama and its like), not in parts."""
        return self._updates.checksums(names, dtype)

    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._loop.run(self._core.sleep(check_tags(tags), on_device=self.frees_memory))

    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._loop.run(self._core.wake(check_tags(tags), on_device=self.frees_memory))

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        return self._loop.run(self._core.abort(None if request_ids is None else frozenset(request_ids)))

    def pause(self) -> None:
        """Interrupts what is running: its tokens so far are kept, and `continue_` asks for the rest."""
        self._loop.run(self._core.pause())

    def continue_(self) -> None:
        self._loop.run(self._core.continue_())

    def health(self) -> EngineHealth:
        core = self._core
        reason = "the engine is closed" if core.closed else "; ".join(core.deaths) or core.weights_gap
        live = [sample for sample in list(core.live.values()) if sample.finish_reason is None]
        held = core.paused
        return EngineHealth(
            ok=not reason,
            reason=reason,
            weight_version=core.version,
            num_running=0 if held else len(live),
            num_waiting=len(live) if held else 0,
            paused=core.paused,
            asleep=core.asleep,
            kv_cache_bytes=self._kv_cache_bytes,
        )

    def restart(self, error: EngineDiedError) -> None:
        """Start new instances in place of the dead ones. They have none of the weights that were sent."""
        if self.restarts_left <= 0:
            raise error
        self.restarts_left -= 1
        self.num_restarts += 1
        logger.warning("%s Starting it again; %d restarts are left.", error, self.restarts_left)
        links = self._core.links
        dead = [index for index, link in enumerate(links) if link.death]
        for index in dead:
            self._loop.run(links[index].close())
        for index, fresh in zip(dead, self._start_links(len(dead)), strict=True):
            links[index] = fresh
        self._updates.forget_groups()
        self._loop.run(self._core.replace(links, "it was started again" if self._needs_weights else ""))

    def close(self) -> None:
        if self._core.closed:
            return
        self._loop.run(self._core.close())
        self._loop.run(self._client.close())
        self._loop.close()

    def _start_links(self, count: int) -> list[SGLangLink]:
        """New instances, started side by side; none is left if one fails."""
        links: list[SGLangLink] = []
        try:
            for _ in range(count):
                if self._num_servers:
                    links.append(ServerLink(self.settings, self._client, python=self._python, cpu=self._cpu))
                else:
                    links.append(InProcessLink(self.settings, cpu=self._cpu))
            self._loop.run(_start(links))
        except BaseException:
            for link in links:
                self._loop.run(link.close())
            raise
        return links

    async def _build_core(self, links: list[SGLangLink], level: Level) -> Core:
        answer = await links[0].call("/server_info", {})
        self._kv_cache_bytes = len(links) * _kv_cache_bytes(answer)
        return Core(links, level=level, deterministic=self.settings.deterministic, weights_gap=self._unloaded)

    def _check_requests(self, requests: Sequence[GenerationRequest]) -> None:
        running = {sample.request.request_id for sample in list(self._core.live.values())}
        ids = Counter(request.request_id for request in requests)
        repeated = [name for name, count in ids.items() if count > 1 or name in running]
        if repeated:
            raise ValueError(f"request_id {repeated[0]!r} is in use; ids of running requests must be unique.")
        for request in requests:
            if request.multi_modal:
                raise UnsupportedPromptError(
                    f"request {request.request_id!r} holds {', '.join(request.multi_modal)}; the SGLang engine takes "
                    "token ids alone. Use rollout.name=vllm."
                )
            check_request(
                request,
                max_model_len=self._max_model_len,
                vocab_size=self._vocab_size,
                mode=self.settings.logprobs,
                deterministic=self.settings.deterministic,
            )

    @property
    def _needs_weights(self) -> bool:
        return self._core.version != 0 or bool(self._unloaded)

    @property
    def _brings_weights_back(self) -> bool:
        """Whether this engine can be restarted without help: it may, and finds the weights it had."""
        return self.restarts_left > 0 and (not self._needs_weights or self.reload_weights is not None)

    def _revive(self) -> bool:
        """Between batches: start servers again that died while others went on."""
        deaths = self._core.deaths
        if self._core.closed or not deaths or not self.restarts_left:
            return False
        self.restart(EngineDiedError(deaths[0]))
        return True


def _complete(samples: Sequence[Sample]) -> dict[str, list[GenerationResult]]:
    """The requests all of whose samples are finished, by their id."""
    by_request: dict[str, list[Sample]] = {}
    for sample in samples:
        by_request.setdefault(sample.request.request_id, []).append(sample)
    return {
        request_id: [sample.result() for sample in group]
        for request_id, group in by_request.items()
        if all(sample.finish_reason is not None for sample in group)
    }


async def _start(links: Sequence[SGLangLink]) -> None:
    for link in links:
        await link.start()


def _kv_cache_bytes(answer: Any) -> int:
    usage = answer["internal_states"][0].get("memory_usage", {})
    return int(float(usage.get("kvcache", 0.0)) * _GIB)
