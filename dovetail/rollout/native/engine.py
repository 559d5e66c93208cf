"""The embedded engine (`rollout.name=native`): continuous batching on Hugging Face modules, CPU and CUDA.

Reads the trainer's weights in place when given its module. Reads no text, and never touches torch's generators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import nn

from dovetail.config.fsdp import full_dtype
from dovetail.config.rollout import RolloutConfig
from dovetail.models.exact import use_exact_modules
from dovetail.models.head import use_float32_head
from dovetail.models.router_replay import RouterReplay
from dovetail.models.stop_ids import folder_stop_ids, model_stop_ids
from dovetail.observability.progress import note_progress
from dovetail.rollout.base import (
    ALL_TAGS,
    DROPPED_BY_SLEEP,
    RUNNING,
    EngineError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    MemoryTag,
    ModelArgs,
    RolloutEngine,
    UnsupportedPromptError,
    check_tags,
)
from dovetail.rollout.gate import StepGate
from dovetail.rollout.native.batch import BatchStats, RunningBatch
from dovetail.rollout.native.images import check_images, prompt_positions
from dovetail.rollout.native.model import load_model, num_embeddings, share_model
from dovetail.rollout.native.packed_linear import pack_linears
from dovetail.rollout.native.scheduler import Sample
from dovetail.rollout.native.weights import WeightLoader
from dovetail.rollout.request_rules import base_seed, check_prompt, stop_tokens
from dovetail.rollout.response import of_requests
from dovetail.rollout.stream import check_new_ids
from dovetail.weight_sync import tensor_checksum

if TYPE_CHECKING:
    from dovetail.rollout.native.cuda.batch import PagedBatch

logger = logging.getLogger(__name__)


class NativeEngine(RolloutEngine):
    """`model` is a folder (the engine loads and owns its weights) or a module whose weights it reads in place.

    `max_num_seqs` bounds the sequences decoded together, `max_prefill_tokens` the prompt tokens of one prefill step,
    `max_model_len` prompt plus response (default: what the model's positions allow). `device` and `dtype` are for
    weights the engine owns; shared weights stay as they are. On CUDA, `gpu_memory_utilization` bounds the KV cache by a
    share of the device's memory, `kv_cache_dtype="fp8"` halves what a token takes of it, and `enforce_eager` turns CUDA
    graphs off. A CPU has dense slots in the place of pages, unless `ops` gives the paged batch operations for it.
    `enable_prefix_caching` keeps the cache of finished sequences, on a CPU of those with a session, until the weights
    change or others need the room.

    `kv_on_update` says what becomes of the KV cache of running requests when the weights change: `recompute` runs them
    through the new weights, `keep` goes on with what the old weights computed, and then the log-probs of the tokens
    that follow are not those of any weights. `exact` computes log-probs to the bits of a trainer with `models.exact`,
    `fp32_lm_head` makes logits in float32 of weights in bfloat16.
    With `keep_experts` requests may ask for the experts of a mixture that tokens were sent to.
    On CUDA a request's sampling mask keeps at most `max_mask_width` ids a token; memory for them is set aside.
    """

    name = "native"

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        max_num_seqs: int = 256,
        max_prefill_tokens: int = 8192,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.5,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        exact: bool = False,
        fp32_lm_head: bool = False,
        max_mask_width: int = 0,
        keep_experts: bool = False,
        ops: Any = None,
        **model_args: Unpack[ModelArgs],
    ) -> None:
        if isinstance(model, nn.Module):
            self._folder = None
            self._model = share_model(model, dtype)
            self._device = next(model.parameters()).device
            self._eos_ids = model_stop_ids(self._model.generation_config, self._model.config)
        else:
            self._folder = Path(model)
            self._device = torch.device(device)
            self._load = partial(load_model, self._folder, self._device, longest_row=max_model_len, **model_args)
            self._model = self._load(dtype)
            self._eos_ids = folder_stop_ids(self._folder, **model_args)
        if exact:
            use_exact_modules(self._model)
        elif fp32_lm_head:
            use_float32_head(self._model)
        self._routing = RouterReplay(self._model) if keep_experts else None
        if self._routing is not None:
            self._routing.begin(None, record=True)
        self._packed = pack_linears(self._model, self._device)
        self._max_model_len = max_model_len or int(self._model.config.get_text_config().max_position_embeddings)
        self._vocab_size = num_embeddings(self._model)
        self._shapes = [parameter.shape for parameter in self._model.parameters()]
        self._batch: RunningBatch | PagedBatch
        self._paged = self._device.type == "cuda" or ops is not None
        if self._paged:
            from dovetail.rollout.native.cuda.batch import PagedBatch
            from dovetail.rollout.native.cuda.kernels.ops import exact_ops, triton_ops
            from dovetail.rollout.native.cuda.pages import cache_dtype_of

            self._batch = PagedBatch(
                self._model,
                self._device,
                max_num_seqs,
                max_prefill_tokens,
                self._max_model_len,
                memory_share=gpu_memory_utilization,
                cache_dtype=cache_dtype_of(kv_cache_dtype, self._model.dtype, self._device),
                use_graphs=not enforce_eager,
                fuse=not exact,
                reuse_prefixes=enable_prefix_caching,
                mask_width=max_mask_width,
                routing=self._routing,
                ops=exact_ops(ops or triton_ops()) if exact else ops,
            )
        elif kv_cache_dtype == "fp8":
            raise ValueError("kv_cache_dtype=fp8 is for CUDA; on a CPU leave rollout.kv_cache_dtype at auto.")
        else:
            kept = max_num_seqs * self._max_model_len if enable_prefix_caching else 0
            self._batch = RunningBatch(
                self._model,
                self._device,
                max_num_seqs,
                max_prefill_tokens,
                max_kept_tokens=kept,
                exact=exact,
                routing=self._routing,
            )
        self._mask_width = max_mask_width if self._paged else None
        self._keeps_cache = kv_on_update == "keep"
        if self._keeps_cache:
            logger.warning(
                "rollout.kv_on_update=keep: responses that run while the weights change go on with keys and values of "
                "the old weights; their log-probs are then not those of the weights. Use recompute for exact ones."
            )
        self._gate = StepGate()
        self._still_from_folder = self._folder is not None
        self._loader: WeightLoader | None = None  # for an update that is staged
        self._running: dict[Sample, Callable[[GenerationResult], None]] = {}
        """Unfinished samples, and who wants their results."""

    @classmethod
    def from_config(
        cls, config: RolloutConfig, folder: str, *, device: torch.device, shared: Any = None, **model: Unpack[ModelArgs]
    ) -> NativeEngine:
        return cls(
            folder if shared is None else shared,
            device=device,
            dtype=getattr(torch, full_dtype(config.dtype)),
            max_num_seqs=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            max_model_len=config.context_length,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_dtype=config.kv_cache_dtype,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_on_update=config.kv_on_update,
            exact=config.exact,
            fp32_lm_head=config.fp32_lm_head,
            max_mask_width=config.top_k if config.keep_sampling_mask else 0,
            keep_experts=config.enable_rollout_routing_replay,
            **model,
        )

    @property
    def stats(self) -> BatchStats:
        return self._batch.stats

    def enqueue(self, requests: Sequence[GenerationRequest], deliver: Callable[[GenerationResult], None]) -> None:
        samples = [sample for request in requests for sample in self._samples_of(request)]
        with self._gate.beside_step() as post:
            self._check_usable()
            running = {sample.request.request_id for sample in list(self._running)}
            check_new_ids([request.request_id for request in requests], running)
            self._running.update((sample, deliver) for sample in samples)
            post(partial(self._batch.add, samples))

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        self._gate.drive(self._step, done, timeout)

    def partial(self, request_ids: Collection[str] | None = None) -> list[GenerationResult]:
        with self._gate.between_steps():
            self._batch.drain()
            self._deliver_finished()
            return [sample.partial() for sample in of_requests(self._running, request_ids)]

    def stage_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Into a second set on the engine's device: the swap is a copy within it."""
        if self._folder is None:
            raise EngineError("this engine reads the trainer's weights in place; there is nothing to stage.")
        self._loader = WeightLoader(self._model)  # built here, not while decoding is held
        self._staged = version, self._loader.stage(weights)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        with self._gate.between_steps():
            self._check_open()
            self._check_weights_awake()
            self._batch.forget_cache(keep_decoding=self._keeps_cache)
            self._forget_packed()
            if self._folder is None:
                if weights is not None:
                    WeightLoader(self._model).check_shared(weights)
            else:
                weights = self._sent(weights)
                # Until the last tensor is in, the model is a mixture of two versions.
                self._partial_update = f"the weight update to version {version} did not finish"
                (self._loader or WeightLoader(self._model)).load(weights)
                self._loader = None
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # so that the seconds held are true
            self._partial_update = ""
            self._still_from_folder = False
            self._version = version

    def weight_checksums(self, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, str]:
        with self._gate.between_steps():
            self._check_open()
            if "weights" in self._asleep:
                return {}
            held = WeightLoader(self._model).tensors(names)
            return {name: tensor_checksum(tensor, dtype) for name, tensor in held.items()}

    def sleep(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        wanted = check_tags(tags)
        with self._gate.between_steps():
            self._check_open()
            if self._batch.num_waiting + self._batch.num_running and not self._gate.paused:
                raise EngineError(RUNNING)
            if "kv_cache" in wanted:
                self._batch.free_cache()
            else:
                self._batch.forget_cache()
            self._forget_packed()
            if "weights" in wanted - self._asleep and self._folder is not None:
                self._loader = None
                for parameter in self._model.parameters():
                    parameter.data = parameter.data.new_empty(0)
            self._asleep |= wanted
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def wake(self, tags: Collection[MemoryTag] = ALL_TAGS) -> None:
        wanted = check_tags(tags)
        with self._gate.between_steps():
            self._check_open()
            if "weights" in wanted & self._asleep and self._folder is not None:
                self._restore_weights()
            self._asleep -= wanted

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        with self._gate.between_steps():
            count = self._batch.abort(request_ids)
            self._deliver_finished()
            return count

    def end_session(self, session: str) -> None:
        if isinstance(self._batch, RunningBatch):  # pages go by their age
            with self._gate.beside_step() as post:
                post(partial(self._batch.end_session, session))

    def pause(self) -> None:
        self._gate.pause()
        with self._gate.between_steps():
            self._batch.drain()
            self._deliver_finished()

    def continue_(self) -> None:
        self._gate.continue_()

    def health(self) -> EngineHealth:
        reason = "the engine is closed" if self._closed else self._partial_update
        return EngineHealth(
            ok=not reason,
            reason=reason,
            weight_version=self._version,
            num_running=self._batch.num_running,
            num_waiting=self._batch.num_waiting,
            paused=self._gate.paused,
            asleep=self._asleep,
            kv_cache_bytes=self._batch.kv_cache_bytes,
        )

    def close(self) -> None:
        self.abort()
        with self._gate.between_steps():
            self._closed = True
            self._batch.free_cache()
            self._forget_packed()

    def _step(self) -> bool:
        self._check_usable()
        ended = self._batch.step(self._version)
        note_progress()
        if ended:
            self._deliver_finished()
        return ended

    def _deliver_finished(self) -> None:
        # A copy: `enqueue` adds samples while a step runs.
        for sample in [sample for sample in list(self._running) if sample.finish_reason is not None]:
            self._running.pop(sample)(sample.result())

    def _samples_of(self, request: GenerationRequest) -> list[Sample]:
        self._check_prompt(request)
        sampling = request.sampling
        seed, stop_ids = base_seed(sampling), stop_tokens(sampling, self._eos_ids)
        images_of = request.request_id if request.multi_modal else None
        group = hash((images_of, tuple(request.prompt_token_ids)))
        positions = prompt_positions(self._model, request)
        max_length = min(len(request.prompt_token_ids) + sampling.max_new_tokens, self._max_model_len)
        return [
            Sample(request, index, seed, stop_ids, max_length, group, positions=positions)
            for index in range(request.sample_index, request.sample_index + sampling.n)
        ]

    def _check_prompt(self, request: GenerationRequest) -> None:
        if request.multi_modal and self._paged:
            raise UnsupportedPromptError(
                f"request {request.request_id!r} carries {', '.join(request.multi_modal)}; on CUDA the native engine "
                "reads token ids only. Use rollout.name=vllm for multimodal prompts."
            )
        width, sampling = self._mask_width, request.sampling
        if sampling.keep_mask and width is not None and sampling.top_k > width:
            raise ValueError(
                f"request {request.request_id!r} keeps a sampling mask of up to top_k={sampling.top_k} ids a "
                f"token, and this engine has room for {width}; build it with max_mask_width={sampling.top_k}."
            )
        if sampling.keep_experts and self._routing is None:
            raise ValueError(
                f"request {request.request_id!r} keeps routed experts; build this engine with keep_experts=True."
            )
        if request.multi_modal:
            check_images(self._model, request)
        check_prompt(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)

    def _restore_weights(self) -> None:
        if self._still_from_folder:
            fresh = self._load(self._model.dtype)
            for parameter, again in zip(self._model.parameters(), fresh.parameters(), strict=True):
                parameter.data = again.data
            return
        for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
            parameter.data = parameter.data.new_empty(shape)
        self._partial_update = DROPPED_BY_SLEEP

    def _forget_packed(self) -> None:
        for linear in self._packed:
            linear.forget()
