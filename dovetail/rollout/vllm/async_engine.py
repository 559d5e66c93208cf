"""vLLM's asynchronous engine (`mode=async`): requests come and go one by one, weights change while they wait.

Its core is a process of its own, so weights arrive through shared memory, a folder, or a group the workers join.
An update pauses generation between two tokens ("keep": requests stay where they are), and everything computed with the
old weights is computed again. Made to live in a Ray actor (`ray_engine.py`), but needs none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Any

from dovetail.rollout.base import (
    ALL_TAGS,
    EngineDiedError,
    EngineError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    LogprobsMode,
    MemoryTag,
)
from dovetail.rollout.engine_settings import runs_on_cpu
from dovetail.rollout.readiness import DROPPED_BY_SLEEP, NO_WEIGHTS, RUNNING, require_usable, require_weights_awake
from dovetail.rollout.request_rules import check_prompt
from dovetail.rollout.vllm import weight_calls
from dovetail.rollout.vllm.core_outputs import CoreOutputs
from dovetail.rollout.vllm.environment import prepare, starting_processes
from dovetail.rollout.vllm.expected import expected_weights, stop_token_ids
from dovetail.rollout.vllm.live import LiveSamples
from dovetail.rollout.vllm.requests import (
    Sample,
    check_logprobs,
    prompt_of,
    samples_of,
    vllm_sampling_params,
)
from dovetail.rollout.vllm.settings import VLLMSettings
from dovetail.weight_sync import DEFAULT_BUCKET_BYTES, DiskVersion, ExpectedWeights, GroupAddress, NamedTensors

logger = logging.getLogger(__name__)


def _death_is_ours(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A dead core as our error: whoever is told in another process would import all of vLLM to read vLLM's own."""

    @wraps(method)
    async def call(*args: Any, **settings: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await method(*args, **settings)
        except EngineDeadError as error:
            message = f"vLLM's engine process died ({error}); its log says why. Start a new engine."
            raise EngineDiedError(message) from error

    return call


class AsyncVLLMEngine:
    """All methods run on one event loop. `start` before anything else."""

    def __init__(self, settings: VLLMSettings, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.settings = settings
        self._bucket_bytes = bucket_bytes
        self._cpu = runs_on_cpu()
        self._llm: Any = None
        self._version = 0
        self._live = LiveSamples()
        self._writing: dict[str, Sample] = {}  # by the core's names
        self._serial = itertools.count()
        self._paused = False
        self._cache_waits = False  # to wake up: a pause holds it back
        self._asleep: frozenset[MemoryTag] = frozenset()
        self._weights_gap = "load_format=dummy loads none" if settings.load_format == "dummy" else ""
        self._updating = asyncio.Lock()

    async def start(self) -> ExpectedWeights:
        """Start vLLM; return what its model takes, for whoever drives updates from outside."""
        prepare(cpu=self._cpu)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = self.settings
        self._expected = expected_weights(
            settings.model, settings.override_config, trust_remote_code=settings.trust_remote_code
        )
        self._eos_ids = stop_token_ids(settings.model, trust_remote_code=settings.trust_remote_code)
        arguments = AsyncEngineArgs(**settings.vllm_arguments(cpu=self._cpu))
        with starting_processes(cpu=self._cpu):
            self._llm = AsyncLLM.from_engine_args(arguments)
        self._read_the_core()
        self._max_model_len = self._llm.model_config.max_model_len
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._logprobs: LogprobsMode = settings.logprobs
        if self._logprobs == "temperature" and not all(await self.call("dovetail_use_temperature_logprobs")):
            self._logprobs = "processed"
        self._kv_cache_bytes = sum(await self.call("dovetail_kv_cache_bytes"))
        return self._expected

    async def generate(self, request: GenerationRequest) -> list[GenerationResult]:
        """Finish one request; its n samples, in order."""
        check_prompt(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        check_logprobs(request.sampling, self._logprobs)
        self._check_usable()
        self._live.check_new([request.request_id])
        samples = samples_of(request, next(self._serial))
        self._live.add(*samples)
        try:
            await asyncio.gather(*(self._run(sample) for sample in samples))
        finally:
            self._live.remove(samples)
        if self._weights_gap:
            raise EngineError(f"a weight update failed while {request.request_id!r} ran: {self._weights_gap}")
        return [sample.result() for sample in samples]

    def num_tokens(self) -> dict[str, int]:
        """Tokens written so far by each running request, all its samples together."""
        return self._live.num_tokens()

    async def update_weights(self, weights: NamedTensors, version: int) -> None:
        """Through shared memory: the source is on this machine."""
        await self._update(weight_calls.loads_through_shared_memory(weights, self._bucket_bytes), version)

    async def update_weights_from_disk(self, found: DiskVersion) -> None:
        await self._update(weight_calls.loads_from_disk(found), found.version)

    async def join_weight_group(self, address: GroupAddress, first_rank: int = 1) -> None:
        await self.call(*weight_calls.join_call(address, first_rank))

    async def receive_weights(self, version: int) -> None:
        await self._update(weight_calls.loads_from_group(), version)

    @_death_is_ours
    async def enter_update(self) -> None:
        """For a driver that makes the calls of an update itself: hold generation between two tokens."""
        self._check_started()
        require_weights_awake(self._asleep)
        await self._updating.acquire()
        if not self._paused:
            await self._hold()
        self._weights_gap = "a weight update did not finish"

    @_death_is_ours
    async def call(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call every worker; one result each."""
        self._check_started()
        return await self._llm.collective_rpc(method, args=args)

    @_death_is_ours
    async def leave_update(self, version: int | None) -> None:
        """Forget what the old weights computed and go on, under `version`; None: the update failed."""
        try:
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            if self._llm.model_config.is_multimodal_model:
                await self._llm.reset_encoder_cache()
            if version is None:
                await self.abort()
            else:
                self._version, self._weights_gap = version, ""
            if not self._paused:
                await self._llm.resume_generation()
        finally:
            self._updating.release()

    @_death_is_ours
    async def pause(self) -> None:
        async with self._updating:
            if not self._paused:
                await self._hold()
                self._paused = True

    @_death_is_ours
    async def continue_(self) -> None:
        async with self._updating:
            self._paused = False
            if self._cache_waits:
                await self._llm.wake_up(["kv_cache"])
                self._cache_waits = False
            await self._llm.resume_generation()

    @_death_is_ours
    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        cut = [sample for sample in self._live.of(request_ids) if sample.finish_reason is None]
        if cut:
            await self._llm.abort([sample.vllm_id for sample in cut])
        return len(cut)

    @_death_is_ours
    async def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        """As the in-process engine: the weights take the KV cache with them; on CPU no memory is given back."""
        if self._live and not self._paused:
            raise EngineError(RUNNING)
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        wanted = frozenset(tags)
        if self._cpu or not self.settings.enable_sleep:
            self._asleep |= wanted
        elif wanted - self._asleep:
            await self._sleep_on_device(wanted)

    @_death_is_ours
    async def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        wanted = frozenset(tags) & self._asleep
        if wanted and not self._cpu and self.settings.enable_sleep:
            # Wide awake, vLLM would go on with what is paused: the cache then has to wait for `continue_`.
            self._cache_waits |= self._paused and "kv_cache" in wanted
            if now := wanted - ({"kv_cache"} if self._cache_waits else set()):
                await self._llm.wake_up(sorted(now))
            if "weights" in wanted and self.settings.sleep_level == 2:
                self._version = NO_WEIGHTS
                self._weights_gap = DROPPED_BY_SLEEP
        self._asleep -= wanted

    async def health(self) -> EngineHealth:
        if self._llm is None:
            reason = "the engine is not started, or closed"
        else:
            reason = "vLLM's engine process died" if self._llm.errored else self._weights_gap
        return EngineHealth(
            ok=not reason,
            reason=reason,
            weight_version=self._version,
            num_running=len(self._live),
            num_waiting=0,
            paused=self._paused,
            asleep=self._asleep,
            kv_cache_bytes=self._kv_cache_bytes,
        )

    async def close(self) -> None:
        if self._llm is not None:
            await self.abort()
            self._llm.shutdown()
            self._llm = None

    @_death_is_ours
    async def _run(self, sample: Sample) -> None:
        room = self._max_model_len - len(sample.request.prompt_token_ids)
        params = vllm_sampling_params(sample, eos_ids=self._eos_ids, room=room)
        try:
            async for output in self._llm.generate(prompt_of(sample.request), params, sample.vllm_id):
                if output.finished:  # its tokens have come from the core before
                    sample.finish(output.outputs[0].finish_reason)
        finally:
            self._writing.pop(sample.core_id, None)

    def _read_the_core(self) -> None:
        """Before the first request. The task that hands vLLM's outputs on is started anew, to hand them to us."""
        llm = self._llm
        llm.output_processor = CoreOutputs(
            llm.output_processor, self._absorb, added=self._name, keeps_statistics=llm.log_stats
        )
        if llm.output_handler is not None:
            llm.output_handler.cancel()
            llm.output_handler = None
        llm._run_output_handler()

    def _name(self, vllm_id: str, core_id: str, num_prompt_tokens: int) -> None:
        sample = self._live.get(vllm_id)
        assert sample is not None, f"vLLM was given request {vllm_id} by somebody else"
        sample.core_id, sample.num_prompt_tokens = core_id, num_prompt_tokens
        self._writing[core_id] = sample

    def _absorb(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            sample = self._writing.get(output.request_id)
            if sample is not None and sample.finish_reason is None:  # else it was aborted while the step ran
                sample.absorb(output, self._version)

    async def _hold(self) -> None:
        """Pause between two tokens, and take in every token written before: it belongs to the old version."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        # What the core wrote before it paused has reached this process, but need not be taken in yet: vLLM hands it on
        # in slices, one turn of the loop each.
        queue = getattr(self._llm.engine_core, "outputs_queue", None)
        while queue is not None and not queue.empty():
            await asyncio.sleep(0.001)
        for _ in range(8 + self.settings.max_num_seqs // 16):
            await asyncio.sleep(0)

    async def _sleep_on_device(self, wanted: frozenset[MemoryTag]) -> None:
        """No call of vLLM puts away one thing more, or the cache alone: wake all, put both away, fetch weights back."""
        if self._asleep or self._cache_waits:
            if self._live:  # they would be written on while all is awake
                raise EngineError("part of the engine is asleep already; continue or abort what is paused first.")
            await self._llm.wake_up(None)
            self._cache_waits = False
        if "weights" in wanted | self._asleep:
            await self._llm.sleep(level=self.settings.sleep_level, mode="keep")
            self._asleep = frozenset(ALL_TAGS)
        else:
            await self._llm.sleep(level=1, mode="keep")
            await self._llm.wake_up(["weights"])
            self._asleep = wanted

    async def _update(self, loads: Iterable[weight_calls.Call], version: int) -> None:
        await self.enter_update()
        done = None
        try:
            calls = weight_calls.update_calls(self._expected, loads)
            try:
                call = next(calls)
                while True:
                    call = calls.send(await self.call(*call))
            except StopIteration:
                done = version
        finally:
            await self.leave_update(done)

    def _check_started(self) -> None:
        if self._llm is None:
            raise EngineError("the engine is not started, or closed; start() it.")

    def _check_usable(self) -> None:
        self._check_started()
        if self._llm.errored:
            raise EngineDiedError("vLLM's engine process died; start a new engine.")
        require_usable(self._asleep, self._weights_gap)
