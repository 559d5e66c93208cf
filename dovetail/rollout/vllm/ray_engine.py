"""`VLLMEngine` in a Ray actor (`mode=async`), driven from here as a `RolloutEngine`.

An engine that dies is started again as often as `restarts` allows: what it had finished is kept, what was running
starts over, and nothing is delivered twice.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dovetail.controller.process_state import DRIVEN_BY
from dovetail.observability.progress import note_progress
from dovetail.observability.waits import Wait, waiting
from dovetail.rollout.base import (
    ALL_TAGS,
    STALL_S,
    Deliver,
    EngineDiedError,
    EngineError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    MemoryTag,
    RolloutEngine,
    WeightUpdateError,
)
from dovetail.rollout.engine_settings import runs_on_cpu
from dovetail.rollout.gate import StepGate
from dovetail.rollout.stream import FailedRequest, check_new_ids
from dovetail.rollout.vllm.engine import VLLMEngine
from dovetail.rollout.vllm.environment import environment
from dovetail.rollout.vllm.settings import VLLMSettings
from dovetail.weight_sync import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    IpcHandle,
    NamedTensors,
    entries_of,
    export_ipc_handle,
    import_ipc_handle,
    iter_buckets,
    read_bucket_file,
    shared_memory_buckets,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 1800.0
"""Of a call that does not generate: the longest is a load of all weights from disk."""
_CLOSE_S = 60.0
"""An engine that does not close by itself within this is killed."""
_TAKE_S = 10.0
_BATCH_S = 0.05
"""Results of this long are returned together: the engine makes no step between two calls of `take`."""


class Progress(NamedTuple):
    results: list[GenerationResult]
    num_tokens: int
    paused: bool


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    deliver: Deliver
    delivered: set[int] = field(default_factory=set)


class EngineActor:
    """Lives in the actor. One thread drives the steps (`take`); others submit, receive weights and answer meanwhile."""

    def __init__(self, settings: VLLMSettings, bucket_bytes: int) -> None:
        self._settings = settings
        self._bucket_bytes = bucket_bytes
        self._results: queue.SimpleQueue[GenerationResult] = queue.SimpleQueue()
        self._arrived: list[tuple[str, torch.Tensor]] = []

    def start(self) -> None:
        """Not in `__init__`: what that raises reaches the caller without its type."""
        self._engine = VLLMEngine(self._settings, bucket_bytes=self._bucket_bytes)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the engine."""
        return getattr(self._engine, method)(*args)

    def enqueue(self, requests: Sequence[GenerationRequest]) -> None:
        self._engine.enqueue(requests, self._results.put)

    def take(self, seconds: float) -> Progress:
        """Drive steps until something has ended, at most so long."""
        engine, begin = self._engine, time.monotonic()

        def done() -> bool:
            if self._results.empty():
                return not engine.num_unfinished
            return not engine.num_unfinished or time.monotonic() - begin >= _BATCH_S or engine.health().paused

        engine.wait(done, seconds)
        results = [self._results.get() for _ in range(self._results.qsize())]
        return Progress(results, engine.num_tokens(), engine.health().paused)

    def read_shared(self, handle: IpcHandle) -> list[int] | None:
        """Bytes of device memory that another process shares; None if this one cannot map it."""
        try:
            return import_ipc_handle(handle, torch.device("cuda")).tolist()
        except RuntimeError as error:
            logger.info("device memory that another process shares cannot be mapped here: %s", error)
            return None

    def receive_file(self, path: str) -> None:
        self._arrived += [(name, tensor.clone()) for name, tensor in read_bucket_file(path)]

    def receive_shared(self, handle: IpcHandle, header: bytes) -> None:
        """A bucket in shared device memory, which the sender fills again after this call."""
        bucket = Bucket(entries_of(header), import_ipc_handle(handle, torch.device("cuda")))
        copied = Bucket(bucket.entries, bucket.buffer[: bucket.num_bytes].clone())
        torch.cuda.current_stream().synchronize()
        self._arrived += list(copied.tensors())

    def forget_received(self) -> None:
        self._arrived = []

    def stage(self, version: int) -> None:
        arrived, self._arrived = self._arrived, []
        self._engine.stage_weights(arrived, version, copy=False)

    def commit(self, version: int) -> float:
        seconds = self._engine.commit_weights(version)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the staged copy: its memory is wanted for the KV cache
        return seconds


def actor_class(
    *, num_cpus: float = 1, num_gpus: float = 0, env_vars: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """`EngineActor` as a Ray actor class: a thread that generates, and a few for everything else.

    The environment variables vLLM needs are set for the actor, where the driver's own do not say otherwise; `env_vars`
    go with them.
    """
    import ray

    env = {
        name: os.environ.get(name, value) for name, value in environment(cpu=runs_on_cpu(), own_process=True).items()
    }
    # Ray starts the actor, so it is no child of this process: whoever watches this one must know that it belongs to it.
    env[DRIVEN_BY] = str(os.getpid())
    threads: dict[str, Any] = {"max_concurrency": 4, "concurrency_groups": {"generate": 1}}
    return ray.remote(
        num_cpus=num_cpus, num_gpus=num_gpus, runtime_env={"env_vars": env | dict(env_vars or {})}, **threads, **options
    )(EngineActor)


def beside_this_process(device: torch.device) -> dict[str, Any]:
    """Options of an actor on this machine, and on `device`, which this process has already: it asks Ray for nothing."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
    if ray.is_initialized():
        node = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = torch.cuda.current_device() if device.index is None else device.index
        options["env_vars"] = {
            "CUDA_VISIBLE_DEVICES": visible[index] if index < len(visible) and visible[index] else str(index),
            # Older versions of Ray show no GPU to an actor that asks for none.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
    return options


class RayVLLMEngine(RolloutEngine):
    """One actor on this machine or another; weights from this process reach it only on this machine, from elsewhere
    use a group or a folder. With `shares`, a GPU that both processes are on, they stay on it if the driver allows that.

    `reload_weights` is called with the engine after a restart and must bring it to the current version; without it an
    engine whose weights have been updated cannot be restarted. `on_device` are options of the actor: num_cpus,
    num_gpus, scheduling_strategy, env_vars.
    """

    name = "vllm"
    _num_tokens = 0  # as `wait` saw it last
    _silent_s = 0.0
    """How long calls of `wait` have seen no progress. The time between calls does not count: nothing is generated."""

    def __init__(
        self,
        settings: VLLMSettings,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        restarts: int = 0,
        shares: torch.device | None = None,
        **on_device: Any,
    ) -> None:
        import ray

        self._ray = ray
        self.settings = settings
        self._bucket_bytes = bucket_bytes
        self.restarts_left = restarts
        self._on_device = on_device
        self._running: dict[str, _Running] = {}  # by the request's id
        self._gate = StepGate()  # a step is a call of `take`
        self._replacing = threading.RLock()  # held while a dead actor is replaced: others wait for the new one
        self._start()
        self._shares = shares if shares is not None and self._can_read(shares) else None

    from_config = VLLMEngine.from_config  # which builds one of these for `mode=async`

    def enqueue(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> None:
        added = {request.request_id: _Running(request, deliver) for request in requests}
        with self._replacing:
            check_new_ids(added.keys(), self._running)
            self._running |= added
            actor = self.actor
        try:
            self._get(actor.enqueue.remote(list(requests)))
        except BaseException as error:
            with self._replacing:
                if isinstance(error, EngineDiedError) and (self.actor is not actor or self._brings_weights_back):
                    return  # `wait` has sent them to a new engine, or will
                for name in added:
                    self._running.pop(name, None)
            raise

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Let the engine generate. One thread at a time asks for results, and delivers those of all."""
        end = None if timeout is None else time.monotonic() + timeout
        with waiting("this worker", f"{len(self._running)} requests of the vLLM engine", limit_s=STALL_S) as wait:
            self._gate.drive(lambda: self._take_or_replace(wait, end), done, timeout)

    def partial(self, request_ids: Collection[str] | None = None) -> list[GenerationResult]:
        return self._call("partial", None if request_ids is None else list(request_ids))

    def num_tokens(self) -> int:
        return self._call("num_tokens")

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        self.stage_weights(self._sent(weights), version)
        self.commit_weights(version)

    def stage_weights(self, weights: NamedTensors, version: int) -> None:
        """Bring an update into the actor while it generates. A misfit is named, and the weights in use stay."""
        self._ask("forget_received")
        for received in self._send(weights):
            self._get(received)
        self._ask("stage", version)

    def commit_weights(self, version: int) -> float:
        """Load what was staged, between two tokens; the seconds that generation was held."""
        seconds = self._ask("commit", version)
        self._version = version
        return seconds

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        return self._call("weight_checksums", list(names), dtype)

    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._call("sleep", list(tags))

    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._call("wake", list(tags))
        self._version = self.health().weight_version

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        names = [name for name in list(self._running) if request_ids is None or name in request_ids]
        if not names:
            return 0
        count = self._call("abort", names)
        while not self._running.keys().isdisjoint(names):  # their ids are free when this returns
            self.wait(lambda: self._running.keys().isdisjoint(names), _TAKE_S)
            # An engine that was started meanwhile has got them again.
            self._call("abort", [name for name in names if name in self._running])
        return count

    def pause(self) -> None:
        self._call("pause")

    def continue_(self) -> None:
        self._call("continue_")

    def health(self) -> EngineHealth:
        """Never raises: a dead actor is a health too."""
        try:
            return self._call("health")
        except EngineError as error:
            return EngineHealth(False, str(error), self._version, 0, 0, False, frozenset(), 0)

    def restart(self, error: EngineDiedError) -> None:
        """Start a new process in place of the dead one. It has none of the weights that were sent."""
        self._take_restart(error)
        self._ray.kill(self.actor)
        self._start()

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._get(self.actor.call.remote("close"), timeout=_CLOSE_S)
        except EngineError as error:
            logger.info("the engine was gone before it was closed: %s", error)
        finally:
            self._ray.kill(self.actor)
            self._closed = True

    def _start(self) -> None:
        self.actor = actor_class(**self._on_device).remote(self.settings, self._bucket_bytes)
        try:
            self._get(self.actor.start.remote(), timeout=START_TIMEOUT_S)
        except BaseException:
            self._ray.kill(self.actor)  # from here on it is a dead engine, and not one that fails in every call
            raise

    def _can_read(self, device: torch.device) -> bool:
        """Whether the engine's process reads memory of `device` that this process shares."""
        if self.settings.tensor_parallel_size > 1:
            return False
        trial = torch.randint(256, (64,), dtype=torch.uint8, device=device)
        try:
            handle = export_ipc_handle(trial)
        except RuntimeError as error:  # of an allocator whose memory no other process can map
            logger.info("weights go through shared memory, because memory of %s cannot be shared: %s", device, error)
            return False
        return self._get(self.actor.read_shared.remote(handle)) == trial.tolist()

    def _send(self, weights: NamedTensors) -> Iterator[Any]:
        """Send bucket by bucket; each must have been received before the next is asked for."""
        if self._shares is not None:
            for bucket in iter_buckets(weights, self._bucket_bytes):
                memory = bucket.buffer.to(self._shares)
                yield self.actor.receive_shared.remote(export_ipc_handle(memory), bucket.header())
            return
        for path in shared_memory_buckets(weights, self._bucket_bytes):
            yield self.actor.receive_file.remote(str(path))

    @property
    def _needs_weights(self) -> bool:
        return self._version != 0 or self.settings.load_format == "dummy"

    def _take_or_replace(self, wait: Wait, end: float | None) -> bool:
        """Whether anything was delivered."""
        wait.restart(self._silent_s)
        try:
            progress = self._take(_TAKE_S if end is None else max(0.0, min(_TAKE_S, end - time.monotonic())))
            idle = not progress.results and not progress.paused and progress.num_tokens == self._num_tokens
            if progress.num_tokens != self._num_tokens:
                note_progress()
            self._num_tokens, self._silent_s = progress.num_tokens, wait.waited() if idle else 0.0
            if idle and wait.is_over():
                raise EngineDiedError(f"the vLLM engine hangs: {wait}, and no token was written.")
            return bool(progress.results)
        except EngineDiedError as error:
            self._silent_s = 0.0
            self._replace(error)
            return False

    def _take(self, seconds: float) -> Progress:
        """What ended, delivered; a request that was sent again after a restart delivers each sample once."""
        take = self.actor.take.options(concurrency_group="generate")
        progress: Progress = self._get(take.remote(seconds), timeout=STALL_S)
        for result in progress.results:
            running = self._running.get(result.request_id)
            if running is None or result.sample_index in running.delivered:
                continue
            running.delivered.add(result.sample_index)
            if len(running.delivered) == running.request.sampling.n:
                del self._running[result.request_id]
            running.deliver(result)
        return progress

    def _replace(self, error: EngineDiedError) -> None:
        """A new engine in place of the dead one, with its weights and the requests that were not complete."""
        with self._replacing:
            if not self._brings_weights_back:
                self._running.clear()
                raise error
            self.restart(error)
            if self._needs_weights and self.reload_weights is not None:
                self.reload_weights(self)
            # One by one: whoever sent a bad request may not have been told before the engine died.
            sent = [(running, self.actor.enqueue.remote([running.request])) for running in self._running.values()]
            for running, answer in sent:
                try:
                    self._get(answer)
                except ValueError as refusal:
                    del self._running[running.request.request_id]
                    running.deliver(FailedRequest(running.request.request_id, refusal))

    def _call(self, method: str, *args: Any) -> Any:
        return self._ask("call", method, *args)

    def _ask(self, method: str, *args: Any) -> Any:
        with self._replacing:
            actor = self.actor
        return self._get(getattr(actor, method).remote(*args))

    def _get(self, references: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
        """Ray's errors as ours: what the engine raised with its own type, a lost or silent actor as EngineDiedError."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        self._check_open()
        try:
            return self._ray.get(references, timeout=timeout)
        except GetTimeoutError as error:
            raise EngineDiedError(f"the vLLM engine hangs: no answer to this worker for {timeout:.0f} s.") from error
        except RayActorError as error:
            raise EngineDiedError(f"the process of the vLLM engine died: {error}") from error
        except RayTaskError as error:
            for kind in (EngineDiedError, EngineError, WeightUpdateError, ValueError):
                if isinstance(error.cause, kind):
                    raise kind(str(error.cause)) from error
            raise
