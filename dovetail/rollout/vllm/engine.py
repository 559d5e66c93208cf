"""vLLM in this process (`rollout.name=vllm`, `mode=sync`): alone, tensor parallel, or one of a trainer's ranks.

Every weight update forgets the prefix cache, and what running requests have computed is computed again. Sampling is
vLLM's own; log-probs mean what `dovetail.rollout.base` says, or the request is refused.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Unpack

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.models.stop_ids import folder_stop_ids
from dovetail.observability.progress import note_progress
from dovetail.rollout.base import (
    ALL_TAGS,
    DROPPED_BY_SLEEP,
    NO_WEIGHTS,
    RUNNING,
    EngineDiedError,
    EngineError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    LogprobsMode,
    MemoryTag,
    ModelArgs,
    RolloutEngine,
    WeightUpdateError,
    check_tags,
)
from dovetail.rollout.engine_settings import runs_on_cpu
from dovetail.rollout.expected import CheckedWeights, expected_weights
from dovetail.rollout.gate import StepGate
from dovetail.rollout.request_rules import check_logprobs, check_prompt
from dovetail.rollout.response import of_requests
from dovetail.rollout.stream import check_new_ids
from dovetail.rollout.vllm import weight_calls
from dovetail.rollout.vllm.environment import prepare, without_compiling
from dovetail.rollout.vllm.lifetime import shut_down, start_engine
from dovetail.rollout.vllm.requests import (
    CoreOutputs,
    Deliver,
    Sample,
    ignore,
    prompt_of,
    samples_of,
    vllm_sampling_params,
)
from dovetail.rollout.vllm.settings import VLLMSettings
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, LoraAdapter, NamedTensors

logger = logging.getLogger(__name__)


class VLLMEngine(RolloutEngine):
    """Built in a process of a larger torch.distributed world, it becomes one of vLLM's externally launched ranks: all
    ranks of that world must build one alike.
    """

    name = "vllm"

    def __init__(self, settings: VLLMSettings, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._cpu = runs_on_cpu()
        prepare(cpu=self._cpu)
        self.settings = settings
        self._bucket_bytes = bucket_bytes
        self._expected = expected_weights(settings.model, **settings.model_args)
        self._eos_ids = folder_stop_ids(settings.model, **settings.model_args)
        self._llm = start_engine(settings, cpu=self._cpu)
        config = self._llm.vllm_config
        self._max_model_len = int(config.model_config.max_model_len)
        self._vocab_size = int(config.model_config.get_vocab_size())
        self._in_process = hasattr(self._llm.model_executor, "driver_worker")
        self._logprobs = self._extend_sampler(settings.logprobs)
        self._kv_cache_bytes = sum(self._call("dovetail_kv_cache_bytes"))
        self._gate = StepGate()
        self._adapter: Any = None  # vLLM's LoRARequest of the adapter in use
        self._running: dict[str, Sample] = {}  # by their id in vLLM
        self._has_ended = False
        self._llm.output_processor = CoreOutputs(
            self._llm.output_processor, self._absorb, keeps_statistics=self._llm.log_stats
        )
        self._serial = itertools.count()
        self._broken = ""
        self._partial_update = "load_format=dummy loads none" if settings.load_format == "dummy" else ""

    @classmethod
    def from_config(
        cls, config: RolloutConfig, folder: str, *, device: torch.device, shared: Any = None, **model: Unpack[ModelArgs]
    ) -> RolloutEngine:
        """`mode=sync` in this process, `mode=async` in a Ray actor. vLLM always has weights of its own."""
        if config.mode == "server":
            raise ValueError("rollout.mode=server is not there for rollout.name=vllm; use sync or async.")
        settings = VLLMSettings.from_config(config, folder, **model)
        bucket_bytes = config.update_weights_bucket_megabytes * 1024**2
        if config.mode == "async":
            from dovetail.rollout.vllm.ray_engine import RayVLLMEngine, beside_this_process

            return RayVLLMEngine(
                settings,
                bucket_bytes=bucket_bytes,
                restarts=config.restart_engine,
                shares=device if device.type == "cuda" else None,
                **beside_this_process(device),
            )
        return cls(settings, bucket_bytes=bucket_bytes)

    @property
    def frees_memory(self) -> bool:
        """Whether `sleep` gives memory back. On CPU vLLM has no way to, and sleep only guards against use."""
        return not self._cpu and self.settings.enable_sleep

    def enqueue(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> None:
        for request in requests:
            check_prompt(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
            check_logprobs(request.sampling, self._logprobs, "this vLLM engine")
        samples = [sample for request in requests for sample in samples_of(request, next(self._serial), deliver)]
        with self._gate.between_steps():
            self._check_usable()
            running = {sample.request.request_id for sample in self._samples()}
            check_new_ids([request.request_id for request in requests], running)
            for number, sample in enumerate(samples):
                try:
                    self._add(sample)
                except Exception:
                    for added in samples[:number]:
                        added.deliver = ignore
                    self._abort(samples[:number])
                    raise

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        self._gate.drive(self._step, done, timeout)

    @property
    def num_unfinished(self) -> int:
        """Samples that were enqueued and have not ended."""
        return len(self._running)

    def num_tokens(self) -> int:
        return sum(len(sample.versions) for sample in self._samples())

    def partial(self, request_ids: Collection[str] | None = None) -> list[GenerationResult]:
        return [sample.partial() for sample in self._samples(request_ids)]

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        self._load(self._sent(weights), version)

    def stage_weights(self, weights: NamedTensors, version: int, *, copy: bool = True) -> None:
        """Copy an update while decoding goes on; `commit_weights` then loads the copy between two tokens.

        The copy is kept where the tensors are, a whole set of weights beside the one in use; `copy=False` keeps the
        tensors themselves. A misfit is named here, and the weights in use stay.
        """
        self._staged = None
        with CheckedWeights(weights, self._expected) as checked:
            copies = {name: tensor.clone() if copy else tensor for name, tensor in checked}
        self._staged = version, copies

    def commit_weights(self, version: int) -> float:
        """Load what was staged for `version`; the seconds that generation was held."""
        return self._load(self._take_staged(version).items(), version, copy=False)

    def _load(self, weights: NamedTensors, version: int, *, copy: bool = True) -> float:
        if self._in_process:
            loads = weight_calls.loads_in_place(weights, copy=copy)
        else:
            loads = weight_calls.loads_through_shared_memory(weights, self._bucket_bytes)
        return self._update(loads, version)

    def update_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Needs `engine_kwargs.vllm.enable_lora`. Requests use this adapter from now on."""
        with self._gate.between_steps():
            self._check_open()
            self._check_weights_awake(before="update_adapter")
            self._drain()
            self._partial_update = f"the update of the adapter to version {version} did not finish"
            self._adapter = weight_calls.load_adapter(self._llm, adapter, self._adapter)
            self._forget_caches()
            self._partial_update = ""
            self._version = version

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        """Checksums of the weights in use, as far as they can be read back; empty under tensor parallelism."""
        with self._gate.between_steps():
            self._check_open()
            dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")
            return self._call("dovetail_checksums", (list(names), dtype_name))[0]

    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        """vLLM cannot keep its KV cache without its weights: giving back the weights gives back both."""
        wanted = check_tags(tags)
        with self._gate.between_steps():
            self._check_open()
            if self._running and not self._gate.paused:
                raise EngineError(RUNNING)
            self._drain()
            self._forget_caches()
            if not self.frees_memory:
                logger.info("sleep(%s): vLLM on CPU keeps its memory.", ", ".join(sorted(wanted)))
                self._asleep |= wanted
            elif wanted - self._asleep:
                self._sleep_on_device(wanted)

    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        wanted = check_tags(tags) & self._asleep
        with self._gate.between_steps():
            self._check_open()
            if wanted and self.frees_memory:
                self._llm.wake_up(sorted(wanted))
                if "weights" in wanted and self.settings.sleep_level == 2:
                    self._version = NO_WEIGHTS
                    self._partial_update = DROPPED_BY_SLEEP
            self._asleep -= wanted

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        with self._gate.between_steps():
            aborted = self._samples(request_ids)
            self._abort(aborted)
            return len(aborted)

    def pause(self) -> None:
        self._gate.pause()
        with self._gate.between_steps():
            self._drain()

    def continue_(self) -> None:
        self._gate.continue_()

    def health(self) -> EngineHealth:
        reason = "the engine is closed" if self._closed else self._broken or self._partial_update
        num_waiting = 0 if self._closed else min(len(self._core.scheduler.waiting), len(self._running))
        return EngineHealth(
            ok=not reason,
            reason=reason,
            weight_version=self._version,
            num_running=len(self._running) - num_waiting,
            num_waiting=num_waiting,
            paused=self._gate.paused,
            asleep=self._asleep,
            kv_cache_bytes=self._kv_cache_bytes,
        )

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.abort()
        finally:
            with self._gate.between_steps():
                self._closed = True
                shut_down(self._llm)
                del self._llm

    @property
    def _core(self) -> Any:
        return self._llm.engine_core.engine_core

    def _samples(self, request_ids: Collection[str] | None = None) -> list[Sample]:
        return of_requests(list(self._running.values()), request_ids)  # a copy: other threads add and remove

    def _abort(self, samples: Sequence[Sample]) -> None:
        if samples:
            self._llm.abort_request([sample.vllm_id for sample in samples], internal=True)
        for sample in samples:
            self._finish(sample, "abort")

    def _finish(self, sample: Sample, reason: str) -> None:
        del self._running[sample.vllm_id]
        sample.finish(reason)

    def _add(self, sample: Sample) -> None:
        room = self._max_model_len - len(sample.request.prompt_token_ids)
        params = vllm_sampling_params(sample, eos_ids=self._eos_ids, room=room)
        prompt = prompt_of(sample.request)
        # The core has a name of its own for it.
        sample.vllm_id = self._llm.add_request(sample.vllm_id, prompt, params, lora_request=self._adapter)
        sample.num_prompt_tokens = self._llm.output_processor.request_states[sample.vllm_id].prompt_len
        self._running[sample.vllm_id] = sample

    def _step(self) -> bool:
        self._check_usable()
        return self._step_once()

    def _step_once(self) -> bool:
        """One engine step; whether any response is complete."""
        self._has_ended = False
        try:
            # vLLM draws from torch's own generator even for rows that have one; the trainer shares this process.
            with torch.random.fork_rng(devices=[]), without_compiling(cpu=self._cpu):
                self._llm.step()
        except Exception as error:
            self._broken = f"a step failed with {type(error).__name__}: {error}"
            raise EngineDiedError(f"the vLLM engine died: {self._broken}") from error
        return self._has_ended

    def _absorb(self, outputs: Sequence[Any]) -> None:
        """Take the core's outputs of one step, and deliver what is complete."""
        for output in outputs:
            sample = self._running.get(output.request_id)
            if sample is None:
                continue  # aborted while the step ran
            sample.absorb(output, self._version)
            note_progress()
            if output.finish_reason is not None:
                self._finish(sample, str(output.finish_reason))
                self._has_ended = True

    def _drain(self) -> None:
        """Take in what is in flight: with asynchronous scheduling (CUDA) vLLM is a step ahead of what it returned."""
        if not getattr(self._core, "batch_queue", None):
            return
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        while self._core.batch_queue:
            self._step_once()
        self._core.resume_scheduler()

    def _update(self, loads: Iterable[weight_calls.Call], version: int) -> float:
        """Load, between two steps; the seconds that took."""
        with self._gate.between_steps():
            start = time.perf_counter()
            self._check_open()
            self._check_weights_awake()
            self._drain()
            # Until the last tensor is in, the model is a mixture of two versions.
            self._partial_update = f"the weight update to version {version} did not finish"
            try:
                self._call_loads(loads)
            finally:
                self._forget_caches()
            self._partial_update = ""
            self._version = version
            return time.perf_counter() - start

    def _call_loads(self, loads: Iterable[weight_calls.Call]) -> None:
        """WeightUpdateError on the first misfit, or on what never came. All loads are read even after a misfit: other
        ranks of a sharded source wait in a gather."""
        self._call("dovetail_begin_update", (asdict(self._expected),))
        problems: list[str] = []
        try:
            for call in loads:
                if not problems:
                    problems = [problem for problem in self._call(*call) if problem]
        finally:
            problems += [problem for problem in self._call("dovetail_finish_update") if problem]
        if problems:
            raise WeightUpdateError(problems[0])

    def _forget_caches(self) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)
        if self._llm.model_config.is_multimodal_model:
            self._llm.reset_encoder_cache()

    def _sleep_on_device(self, wanted: frozenset[MemoryTag]) -> None:
        if self._asleep:
            self._llm.wake_up(None)
        if "weights" in wanted | self._asleep:
            self._llm.sleep(level=self.settings.sleep_level, mode="keep")
            self._asleep = frozenset(ALL_TAGS)
        else:
            # No call of vLLM 0.26 drops the cache alone: put both away, weights to the host, and fetch those back.
            self._llm.sleep(level=1, mode="keep")
            self._llm.wake_up(["weights"])
            self._asleep = wanted

    def _call(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._llm.engine_core.collective_rpc(method, None, args)

    def _extend_sampler(self, wanted: LogprobsMode) -> LogprobsMode:
        if wanted != "temperature" or all(self._call("dovetail_use_temperature_logprobs")):
            return wanted
        logger.info("vLLM's sampler cannot be extended here: log-probs before top-k or top-p filtering are refused.")
        return "processed"

    def _check_open(self) -> None:
        super()._check_open()
        if self._broken:
            raise EngineDiedError(f"the vLLM engine is dead: {self._broken}")


vLLMRollout = VLLMEngine
