"""An asynchronous vLLM engine in a Ray actor, driven from here as a `RolloutEngine`.

An engine that dies is started again as often as `restarts` allows: what it had finished is kept, what it was writing
is written anew, and nothing is counted twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.observability.waits import Wait
from dovetail.observability.waits import waiting as named_wait
from dovetail.rollout.base import (
    ALL_TAGS,
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
from dovetail.rollout.readiness import CLOSED
from dovetail.rollout.request_rules import check_different_ids
from dovetail.rollout.vllm import weight_calls
from dovetail.rollout.vllm.async_engine import AsyncVLLMEngine
from dovetail.rollout.vllm.environment import environment
from dovetail.rollout.vllm.settings import VLLMSettings
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, DiskVersion, ExpectedWeights, GroupAddress, lend

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 1024
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 1800.0
"""Of a call that does not generate: the longest is a load of all weights from disk."""
SILENCE_S = 600.0
"""An engine that is not paused and writes no token for this long hangs."""
_LOOK_S = 10.0


def vllm_actor_class(
    *, num_cpus: float = 1, num_gpus: float = 0, env_vars: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """`AsyncVLLMEngine` as a Ray actor class: one event loop, up to `MAX_CONCURRENCY` calls at once.

    The environment variables vLLM needs are set for the actor, where the driver's own do not say otherwise; `env_vars`
    go with them.
    """
    import ray

    env = {
        name: os.environ.get(name, value) for name, value in environment(cpu=runs_on_cpu(), own_process=True).items()
    }
    env |= env_vars or {}
    actor: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_concurrency": MAX_CONCURRENCY}
    return ray.remote(**actor, runtime_env={"env_vars": env}, **options)(AsyncVLLMEngine)


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
    use a group or a folder. With `lends`, a GPU that both processes are on, they stay on it if the driver allows that.

    `reload_weights` is called with the engine after a restart and must bring it to the current version; without it an
    engine whose weights have been updated cannot be restarted. `on_device` are options of the actor: num_cpus,
    num_gpus, scheduling_strategy, env_vars.
    """

    name = "vllm"

    def __init__(
        self,
        settings: VLLMSettings,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        restarts: int = 0,
        reload_weights: Callable[[RayVLLMEngine], None] | None = None,
        lends: torch.device | None = None,
        **on_device: Any,
    ) -> None:
        import ray

        self._ray = ray
        self.settings = settings
        self._bucket_bytes = bucket_bytes
        self.restarts_left = restarts
        self.reload_weights = reload_weights
        self._on_device = on_device
        self._closed = False
        self._version = 0
        self._expected = self._start()
        self._lends = lends if lends is not None and self._can_read(lends) else None

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
        return cls(
            VLLMSettings.from_config(
                config, folder, trust_remote_code=trust_remote_code, override_config=override_config
            ),
            bucket_bytes=config.update_weights_bucket_megabytes * 1024**2,
            restarts=config.restart_engine,
            lends=device if device.type == "cuda" else None,
            **beside_this_process(device),
        )

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_workers(self) -> int:
        return self.settings.tensor_parallel_size * self.settings.pipeline_parallel_size

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        finished: dict[str, list[GenerationResult]] = {}
        while len(finished) < len(requests):
            try:
                self._generate([request for request in requests if request.request_id not in finished], finished)
            except EngineDiedError as error:
                if not self._brings_weights_back:
                    raise EngineDiedError(str(error), finished) from error
                logger.warning("%s Starting it again; %d restarts are left.", error, self.restarts_left - 1)
                self.restart(error)
                if self._needs_weights and self.reload_weights is not None:
                    self.reload_weights(self)
        return [result for request in requests for result in finished[request.request_id]]

    def num_tokens(self) -> dict[str, int]:
        """Tokens written so far by each running request."""
        return self._get(self.actor.num_tokens.remote())

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        if weights is None:
            raise ValueError("update_weights(None) is for engines that share the trainer's memory; vLLM has its own.")
        if self._lends is not None:
            loads = weight_calls.loads_on_device(weights, self._bucket_bytes, self._lends)
        else:
            loads = weight_calls.loads_through_shared_memory(weights, self._bucket_bytes)
        self._get(self.actor.enter_update.remote())
        done = None
        try:
            calls = weight_calls.update_calls(self._expected, loads)
            weight_calls.run_calls(calls, lambda method, args: self._get(self.actor.call.remote(method, args)))
            done = version
        finally:
            self._get(self.actor.leave_update.remote(done))
        self._version = version

    def update_weights_from_disk(self, found: DiskVersion) -> None:
        self._get(self.actor.update_weights_from_disk.remote(found))
        self._version = found.version

    def join_weight_group(self, address: GroupAddress, first_rank: int = 1) -> None:
        self._get(self.actor.join_weight_group.remote(address, first_rank))

    def receive_weights(self, version: int) -> None:
        self._get(self.actor.receive_weights.remote(version))
        self._version = version

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        return self._get(self.actor.call.remote(*weight_calls.checksum_call(names, dtype)))[0]

    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._get(self.actor.sleep.remote(list(tags)))

    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        self._get(self.actor.wake.remote(list(tags)))
        self._version = self.health().weight_version

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        return self._get(self.actor.abort.remote(None if request_ids is None else list(request_ids)))

    def pause(self) -> None:
        self._get(self.actor.pause.remote())

    def continue_(self) -> None:
        self._get(self.actor.continue_.remote())

    def health(self) -> EngineHealth:
        """Never raises: a dead actor is a health too."""
        try:
            return self._get(self.actor.health.remote())
        except EngineError as error:
            return EngineHealth(False, str(error), self._version, 0, 0, False, frozenset(), 0)

    def restart(self, error: EngineDiedError) -> None:
        """Start a new process in place of the dead one. It has none of the weights that were sent."""
        if self.restarts_left <= 0:
            raise error
        self.restarts_left -= 1
        self.num_restarts += 1
        self._ray.kill(self.actor)
        self._start()

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._get(self.actor.close.remote())
        except EngineError as error:
            logger.info("the engine was gone before it was closed: %s", error)
        self._ray.kill(self.actor)
        self._closed = True

    def _start(self) -> ExpectedWeights:
        self.actor = vllm_actor_class(**self._on_device).remote(self.settings, bucket_bytes=self._bucket_bytes)
        return self._get(self.actor.start.remote(), timeout=START_TIMEOUT_S)

    def _can_read(self, device: torch.device) -> bool:
        """Whether the one worker of the engine reads memory of `device` that this process lends."""
        if self.num_workers > 1:
            return False
        trial = torch.randint(256, (64,), dtype=torch.uint8, device=device)
        try:
            call = weight_calls.trial_call(lend(trial))
        except RuntimeError as error:  # of an allocator whose memory no other process can map
            logger.info("weights go through shared memory, because memory of %s cannot be lent: %s", device, error)
            return False
        return self._get(self.actor.call.remote(*call)) == [trial.tolist()]

    @property
    def _needs_weights(self) -> bool:
        return self._version != 0 or self.settings.load_format == "dummy"

    @property
    def _brings_weights_back(self) -> bool:
        """Whether this engine can be restarted without help: it may, and finds the weights it had."""
        return self.restarts_left > 0 and (not self._needs_weights or self.reload_weights is not None)

    def _generate(self, requests: Sequence[GenerationRequest], finished: dict[str, list[GenerationResult]]) -> None:
        """Add to `finished` what gets finished, also when the engine dies; any other failure ends the rest."""
        ids = [request.request_id for request in requests]
        check_different_ids(ids)
        waiting = {self.actor.generate.remote(request): request.request_id for request in requests}
        death: EngineDiedError | None = None
        progress = 0
        try:
            with named_wait("this worker", f"{len(waiting)} requests of the vLLM engine", limit_s=SILENCE_S) as wait:
                while waiting:
                    ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_LOOK_S)
                    if not ready:
                        before, progress = progress, self._progress(wait)
                        if before != progress:
                            wait.restart()
                        elif wait.is_over():
                            raise EngineDiedError(f"the vLLM engine hangs: {wait}, and no token was written.")
                        continue
                    request_id = waiting.pop(ready[0])
                    wait.restart()
                    try:
                        finished[request_id] = self._get(ready[0])
                    except EngineDiedError as error:
                        death = error
        except EngineDiedError:
            raise
        except BaseException:
            if waiting:
                self.abort(waiting.values())
            raise
        if death is not None:
            raise death

    def _progress(self, wait: Wait) -> int:
        """Tokens that the running requests have; a paused engine owes none, so the wait begins anew."""
        if self._get(self.actor.health.remote(), timeout=wait.left() + _LOOK_S).paused:
            wait.restart()
        return sum(self._get(self.actor.num_tokens.remote(), timeout=wait.left() + _LOOK_S).values())

    def _get(self, references: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
        """Ray's errors as ours: what the engine raised with its own type, a lost or silent actor as EngineDiedError."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        if self._closed:
            raise EngineError(CLOSED)
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
