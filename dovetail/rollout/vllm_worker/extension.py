"""Methods that vLLM adds to its worker class (`worker_extension_cls`): weight updates, and what a client must know.

An update is begin, any number of loads, finish; every worker does the same. Errors of a load are returned in words, not
raised: an exception that leaves a worker process reaches the caller without its type, and a worker that stops in the
middle of a broadcast leaves the sender and all other receivers waiting. What servers return is plain JSON. Names begin
with `dovetail_` because they share a namespace with vLLM's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dovetail.rollout.expected import model_shape
from dovetail.weight_sync import (
    BroadcastFailedError,
    ExpectedWeights,
    GroupAddress,
    WeightAccount,
    WeightReceiver,
    read_bucket_file,
    tensor_checksum,
)

logger = logging.getLogger(__name__)


class WorkerExtension:
    """`model_runner`, `vllm_config`, `device` and `rank` are those of vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _dovetail_gives_temperature_logprobs = False
    _dovetail_version: int | None = None
    """Of the last complete update; None before the first, and from the beginning of an update to its end."""

    def dovetail_server_info(self) -> dict[str, Any]:
        """From every worker alike."""
        config = self.vllm_config
        processed = "processed" in str(config.model_config.logprobs_mode)
        unextended = "processed" if processed else "raw"
        return {
            "weight_version": self._dovetail_version,
            "num_workers": config.parallel_config.world_size,
            "logprobs": "temperature" if self._dovetail_gives_temperature_logprobs else unextended,
            "shape": model_shape(config.model_config.hf_config),
        }

    def dovetail_set_version(self, version: int | None) -> None:
        self._dovetail_version = version

    def dovetail_use_temperature_logprobs(self) -> bool:
        """Log-probs under the temperature, before any filtering. False where the sampler cannot be extended."""
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.worker.gpu.sample.sampler import Sampler as GpuSampler

        runner = self.model_runner
        kind = type(getattr(runner, "sampler", None))
        if kind not in (Sampler, GpuSampler) or self.vllm_config.speculative_config is not None:
            return False
        if kind is Sampler:
            from dovetail.rollout.vllm_worker.sampler import TemperatureLogprobsSampler

            runner.sampler = TemperatureLogprobsSampler(runner.sampler.use_fp64_gumbel)
        else:
            from dovetail.rollout.vllm_worker.gpu_sampler import TemperatureLogprobsGpuSampler

            TemperatureLogprobsGpuSampler.take_over(runner.sampler)
        self._dovetail_gives_temperature_logprobs = True
        return True

    def dovetail_kv_cache_bytes(self) -> int:
        return sum(_num_bytes(cache) for cache in getattr(self.model_runner, "kv_caches", ()))

    def dovetail_join_group(self, address: Mapping[str, Any], first_rank: int) -> None:
        """Join the sender's group as rank `first_rank` + this worker's rank."""
        device = self.device if address["backend"] == "nccl" else "cpu"
        earlier: WeightReceiver | None = getattr(self, "_dovetail_receiver", None)
        if earlier is not None:
            earlier.close()
        self._dovetail_receiver = WeightReceiver(GroupAddress(**address), first_rank + self.rank, device)

    def dovetail_begin_update(self, expected: Mapping[str, Any]) -> None:
        """`expected` holds the fields of `ExpectedWeights`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._dovetail_version = None
        self._dovetail_account = WeightAccount(ExpectedWeights(**expected))
        with self._dovetail_config():
            initialize_layerwise_reload(self.model_runner.get_model())

    def dovetail_load(self, named: list[tuple[str, Tensor]]) -> str | None:
        """Load these; the first misfit in words, or None. Tensors may be kept until their layer is complete."""
        for name, tensor in named:
            problem = self._dovetail_account.problem_with(name, tuple(tensor.shape))
            if problem is not None:
                return problem
        try:
            with self._dovetail_config():
                self.model_runner.get_model().load_weights(named)
        except Exception as error:
            logger.exception("weights could not be loaded")
            return f"loading weights failed with {type(error).__name__}: {error}"
        return None

    def dovetail_load_bucket(self, path: str) -> str | None:
        """From shared memory."""
        return self.dovetail_load(read_bucket_file(path))

    def dovetail_load_file(self, path: str) -> str | None:
        """From a safetensors file."""
        return self.dovetail_load(list(load_file(path).items()))

    def dovetail_receive(self) -> str | None:
        """Load everything the sender of the group sends. Drains the stream even after a misfit: others still read."""
        problem = None
        try:
            for bucket in self._dovetail_receiver.buckets():
                problem = problem or self.dovetail_load(list(bucket.tensors()))
        except BroadcastFailedError as error:
            problem = problem or str(error)
        return problem

    def dovetail_finish_update(self) -> str | None:
        """Put the model together again, complete or not; what never arrived, in words, or None."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with self._dovetail_config():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_heads(model)
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):  # what was computed from weights
            if hasattr(self.model_runner, forget):
                getattr(self.model_runner, forget)()
        return self._dovetail_account.missing()

    def dovetail_checksums(self, names: list[str], dtype: str | None = None) -> dict[str, str]:
        """Checksums of the weights this worker computes with, as far as they can be read; none of a part of a weight.

        The language heads come along, asked for or not.
        """
        if self.vllm_config.parallel_config.world_size > 1:
            return {}
        from dovetail.rollout.vllm_worker.readback import head_names, read_weight

        model = self.model_runner.get_model()
        held = {name: read_weight(model, name) for name in {*names, *head_names(model)}}
        rounded = None if dtype is None else getattr(torch, dtype)
        return {name: tensor_checksum(tensor, rounded) for name, tensor in held.items() if tensor is not None}

    def _dovetail_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)


def _repack_heads(model: nn.Module) -> None:
    """On CPU a language head is a packed copy. Tied to the embedding it gets no tensor of its own, so vLLM's reload
    never packs it again (seen in 0.32) and the model would go on with the old head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _num_bytes(cache: Any) -> int:
    if isinstance(cache, Tensor):
        return cache.nbytes
    return sum(_num_bytes(part) for part in cache) if isinstance(cache, (list, tuple)) else 0
