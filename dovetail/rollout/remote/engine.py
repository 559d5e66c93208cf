"""Servers as one rollout engine: by URL (`rollout.mode=server`, `rollout.server_urls`), or those SGLang is run as.

Each sample is one call, sent to the server that has its prompt in its cache. A pause ends all calls and keeps their
tokens; `continue_` asks for the rest, with prompt and tokens as the new prompt. So weights change only while no call
runs, every token has the version that generated it, and a server that dies loses only the work since its calls began.
Closing the engine leaves servers by URL running.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, TypeVar, Unpack

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.models.load import load_config
from dovetail.models.stop_ids import folder_stop_ids
from dovetail.rollout.base import (
    ALL_TAGS,
    CLOSED,
    DROPPED_BY_SLEEP,
    RUNNING,
    Deliver,
    EngineError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    LogprobsMode,
    MemoryTag,
    ModelArgs,
    RolloutEngine,
    UnsupportedPromptError,
    check_tags,
)
from dovetail.rollout.engine_settings import logprobs_of
from dovetail.rollout.expected import expected_weights, model_shape
from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.remote.calls import SampleCalls
from dovetail.rollout.remote.client import HttpClient, ServerError
from dovetail.rollout.remote.dialect import Dialect, ServerInfo, require_same_shape
from dovetail.rollout.remote.pool import SILENCE_S, ServerPool
from dovetail.rollout.remote.samples import RemoteSample, samples_of
from dovetail.rollout.remote.sglang_dialect import SGLangDialect
from dovetail.rollout.remote.update import WeightUpdater, on_first_rank
from dovetail.rollout.remote.vllm_dialect import VLLMDialect
from dovetail.rollout.remote.weights import DiskChannel, GroupChannel, SharedMemoryChannel, WeightChannel
from dovetail.rollout.request_rules import check_logprobs, check_prompt
from dovetail.rollout.response import of_requests
from dovetail.rollout.stream import FailedRequest
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")
DialectName = Literal["vllm", "sglang"]


class RemoteRollout(RolloutEngine):
    """`folder` is the model the servers must have. `weights_folder` is seen by all of them under this path; without
    one, weights are broadcast. In a trainer of several processes each has such an engine over the same servers, and
    `update_weights` is collective: the first process sends.
    """

    name = "remote"
    on_trainer_devices = False
    owns_servers: ClassVar[bool] = False
    """Whether nobody else calls the servers, and they are on this machine."""
    frees_memory: bool = True
    """Whether `sleep` gives memory back; otherwise it only guards against use."""

    def __init__(
        self,
        urls: Sequence[str],
        folder: str,
        *,
        dialect: DialectName = "vllm",
        weights_folder: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        logprobs: LogprobsMode = "temperature",
        max_model_len: int | None = None,
        silence_s: float = SILENCE_S,
        api_key: str | None = None,
        device: torch.device | str = "cpu",
        **model_args: Unpack[ModelArgs],
    ) -> None:
        config = load_config(folder, **model_args)
        self._folder = folder
        # Servers are started by others, with the same overrides: `require_same_shape` finds those that are not.
        self._expected = expected_weights(folder, **model_args)
        self._shape = model_shape(config)
        self._vocab_size = int(self._shape["vocab_size"])
        self._eos_ids = folder_stop_ids(folder, **model_args)
        own_length = max_model_len or getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31
        self._paused = False
        self._progress = threading.Condition()
        self._num_tokens: dict[str, int] = {}  # what each server said last
        self._loop = LoopThread("dovetail-remote-rollout")
        client = HttpClient(api_key=api_key)
        try:
            self._dialect = self._build_dialect(dialect, client, logprobs=logprobs, max_model_len=own_length)
            self._pool = ServerPool(
                urls,
                client,
                health_path=self._dialect.health_path,
                admit=self._admit,
                num_tokens=self._dialect.num_tokens,
                silence_s=silence_s,
            )
            self._calls = SampleCalls(self._pool, self._dialect, self._no_server)
            infos = self._run(self._connect())
        except BaseException:
            self._loop.run(client.close())
            self._loop.close()
            raise
        self._infos = infos
        self._max_model_len = min([own_length, *(info.max_model_len for info in infos.values())])
        self._updater = WeightUpdater(
            self._pool,
            self._calls,
            self._channel(weights_folder, bucket_bytes, torch.device(device)),
            refusal=next((info.takes_no_weights for info in infos.values() if info.takes_no_weights), ""),
        )

    @classmethod
    def from_config(
        cls, config: RolloutConfig, folder: str, *, device: torch.device, shared: Any = None, **model: Unpack[ModelArgs]
    ) -> RolloutEngine:
        """`rollout.name` says what the servers are, `rollout.server_urls` where."""
        if config.name not in ("vllm", "sglang"):
            raise ValueError(f"rollout.name={config.name} runs in the trainer's process; servers are vllm or sglang.")
        if config.weight_sync == "disk" and config.weights_folder is None:
            raise ValueError("rollout.weight_sync=disk needs rollout.weights_folder, which all servers see.")
        uses_disk = config.weights_folder is not None and config.weight_sync != "broadcast"
        return cls(
            config.server_urls,
            folder,
            dialect=config.name,
            weights_folder=config.weights_folder if uses_disk else None,
            bucket_bytes=config.update_weights_bucket_megabytes * 1024**2,
            logprobs=logprobs_of(config),
            max_model_len=config.context_length,
            silence_s=config.server_timeout_s,
            api_key=_api_key(config.server_api_key_env),
            device=device,
            **model,
        )

    @property
    def weight_version(self) -> int:
        return self._calls.version

    def enqueue(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> None:
        def ended(sample: RemoteSample, error: BaseException | None) -> None:
            with self._progress:
                deliver(sample.result() if error is None else FailedRequest(sample.request.request_id, error))
                self._progress.notify_all()

        self._run(self._calls.start(self._samples_of(requests), ended))

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        with self._progress:
            self._progress.wait_for(lambda: done() or self._closed, timeout)
        if not done():
            self._check_open()

    def partial(self, request_ids: Collection[str] | None = None) -> list[GenerationResult]:
        """What calls that have ended wrote: servers tell no more before a call ends."""
        return [sample.partial() for sample in of_requests(self._calls.live, request_ids)]

    def num_tokens(self) -> int:
        """By the servers' own counts. One that gives none, or hangs, makes progress only when a call ends."""

        async def ask(server: str) -> None:
            with suppress(ServerError):
                self._num_tokens[server] = await self._dialect.num_tokens(server)

        self._run(self._on_all(ask))
        return super().num_tokens() + sum(self._num_tokens.values())

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        weights = self._sent(weights)
        self._check_open()
        self._check_weights_awake()
        self._update(weights, version)

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        """What all servers agree on. A tensor in which they differ has a checksum that is no tensor's."""
        word = None if dtype is None else str(dtype).removeprefix("torch.")
        known = dict(self._expected.shapes) | dict(self._expected.optional)
        shapes = {name: known[name] for name in names if name in known}
        held = self._run(self._on_all(lambda server: self._dialect.checksums(server, shapes, word)))
        checksums: dict[str, str] = {}
        for name in {name for each in held for name in each}:
            values = {each.get(name, "missing") for each in held}
            checksums[name] = values.pop() if len(values) == 1 else "servers differ"
        return checksums

    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        """On each server, as far as it can. Weights that slept must be sent again."""
        self._check_open()
        if self._calls.num_live and not self._paused:
            raise EngineError(RUNNING)
        wanted = check_tags(tags) - self._asleep
        if wanted and self.frees_memory:
            self._run(self._on_all(lambda server: self._dialect.sleep(server, wanted)))
        self._asleep |= wanted

    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._check_open()
        wanted = check_tags(tags) & self._asleep
        if wanted and self.frees_memory:
            self._run(self._on_all(lambda server: self._dialect.wake(server, wanted)))
            if "weights" in wanted:
                self._updater.partial_update = DROPPED_BY_SLEEP
        self._asleep -= wanted

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        return self._run(self._calls.abort(None if request_ids is None else frozenset(request_ids)))

    def pause(self) -> None:
        """Calls end; what they wrote is kept, and the rest is sent again by `continue_`."""
        self._check_open()
        if not self._paused:
            self._run(self._calls.shut(self._pool.up()))
            self._paused = True

    def continue_(self) -> None:
        self._check_open()
        if self._paused:
            self._paused = False
            self._run(self._updater.resume(self._pool.servers))

    def health(self) -> EngineHealth:
        down = "" if self._closed else "; ".join(f"{name}: {why}" for name, why in self._pool.down().items())
        reason = "the engine is closed" if self._closed else self._updater.partial_update or down
        usable = not self._closed and not self._updater.partial_update and bool(self._pool.up())
        return EngineHealth(
            ok=usable,
            reason=reason,
            weight_version=self.weight_version,
            num_running=self._calls.num_running,
            num_waiting=self._calls.num_live - self._calls.num_running,
            paused=self._paused,
            asleep=self._asleep,
            kv_cache_bytes=sum(info.kv_cache_bytes for info in self._infos.values()),
        )

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.abort()
            self.continue_()
        finally:
            with self._progress:
                self._closed = True
                self._progress.notify_all()
            self._loop.run(self._pool.close())
            self._loop.run(self._pool.client.close())
            self._loop.close()

    async def _connect(self) -> dict[str, ServerInfo]:
        """Every server must be there at the start: one that is not is more likely a typo than an accident."""
        infos = await asyncio.gather(*map(self._dialect.info, self._pool.servers))
        by_server = dict(zip(self._pool.servers, infos, strict=True))
        for server, info in by_server.items():
            require_same_shape(server, info.shape, self._shape, self._folder)
        self._pool.start()
        logger.info("%d servers (%s) answer: %s", len(by_server), self._dialect.name, ", ".join(by_server))
        return by_server

    async def _admit(self, server: str) -> None:
        await self._updater.admit(server, self._folder, self._shape, paused=lambda: self._paused)

    def _channel(self, weights_folder: str | None, bucket_bytes: int, device: torch.device) -> WeightChannel:
        common = self._dialect, self._loop, self._expected, bucket_bytes
        if weights_folder is not None:
            return DiskChannel(*common, weights_folder)
        if self.owns_servers:
            return SharedMemoryChannel(*common)
        return GroupChannel(*common, "nccl" if device.type == "cuda" else "gloo", device)

    def _update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """The ranks of a trainer share the servers: the first one sends."""
        on_first_rank(weights, lambda stream: self._updater.update(stream, version, stay_paused=self._paused))
        self._updater.arrived(version)

    def _samples_of(self, requests: Sequence[GenerationRequest]) -> list[RemoteSample]:
        """All of them, or the error of the first that cannot be served."""
        for request in requests:
            self._check_request(request)
        self._check_usable()
        self._bring_up_to_date()
        return [
            sample
            for request in requests
            for sample in samples_of(request, eos_ids=self._eos_ids, max_model_len=self._max_model_len)
        ]

    async def _no_server(self, error: EngineError) -> None:
        """No server is left for a sample: raise, or shut the gate until there is one again."""
        raise error

    def _bring_up_to_date(self) -> None:
        """Servers that were started again since the last update have old weights: they must not write."""
        self._run(self._updater.take_out_forgetful())
        if not self._pool.up() and self.reload_weights is not None and self._updater.has_updated:
            self.reload_weights(self)

    def _check_request(self, request: GenerationRequest) -> None:
        if request.multi_modal:
            raise UnsupportedPromptError(
                f"request {request.request_id!r} holds {', '.join(request.multi_modal)}; servers are sent token ids "
                "only. Use rollout.mode=sync with rollout.name=vllm for multimodal prompts."
            )
        check_prompt(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        for server, info in self._infos.items():
            if info.deterministic and request.sampling.min_p > 0:
                # An assertion in its sampler: the scheduler dies, and the batch with it.
                raise ValueError(
                    f"min_p={request.sampling.min_p} cannot be used with enable_deterministic_inference: SGLang's "
                    "seeded sampler dies of it. Use top_p, or turn deterministic inference off."
                )
            check_logprobs(request.sampling, info.logprobs, server)

    async def _on_all(self, call: Callable[[str], Coroutine[Any, Any, T]]) -> list[T]:
        return await asyncio.gather(*map(call, self._pool.up()))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise EngineError(CLOSED)
        return self._loop.run(coroutine)

    def _check_usable(self) -> None:
        with self._updater.lock:
            self._partial_update = self._updater.partial_update
        super()._check_usable()

    def _build_dialect(
        self, name: DialectName, client: HttpClient, *, logprobs: LogprobsMode, max_model_len: int
    ) -> Dialect:
        if name == "vllm":
            return VLLMDialect(client, logprobs=logprobs)
        meaning: LogprobsMode = logprobs if self.owns_servers else "temperature"
        return SGLangDialect(client, max_model_len=max_model_len, logprobs=meaning, shared=not self.owns_servers)


def _api_key(variable: str | None) -> str | None:
    """What the environment variable of `rollout.server_api_key_env` holds."""
    if variable is not None and not os.environ.get(variable):
        raise ValueError(
            f"rollout.server_api_key_env={variable} names an environment variable that is not set in this process; "
            "export it before the run (on every node), or set the key to null for servers that ask for none."
        )
    return None if variable is None else os.environ[variable]
