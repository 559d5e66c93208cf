"""How a vLLM engine is set up, and the arguments vLLM gets. Decides nothing about placement or Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import LogprobsMode, ModelArgs
from dovetail.rollout.engine_settings import EngineSettings, shared_settings

EXTENSION = "dovetail.rollout.vllm_worker.extension.WorkerExtension"
_LOGPROBS_MODE: Mapping[LogprobsMode, str] = {
    # The workers' sampler is then extended to score before filtering; see `vllm_worker/sampler.py`.
    "temperature": "processed_logprobs",
    "processed": "processed_logprobs",
    "raw": "raw_logprobs",
}
_OURS = {"worker_extension_cls": "it carries the weight updates", "logprobs_mode": "set rollout.logprobs_mode instead"}
_SAME_ARGUMENTS = (
    *("model", "dtype", "kv_cache_dtype", "tensor_parallel_size", "max_model_len"),
    *("max_num_seqs", "gpu_memory_utilization", "enforce_eager", "enable_chunked_prefill", "enable_prefix_caching"),
    *("scheduling_policy", "disable_log_stats", "trust_remote_code", "seed"),
)
_CPU_KV_CACHE_BYTES = 1024**3
_LARGEST_GRAPH = 512  # of vLLM's own choice, whatever max_num_seqs


@dataclass(frozen=True, slots=True)
class VLLMSettings(EngineSettings):
    """The fields that only vLLM has. `sleep_level` 2 drops the weights in sleep, 1 keeps them in host memory."""

    scheduling_policy: str = "fcfs"
    sleep_level: Literal[1, 2] = 2

    @classmethod
    def from_config(cls, rollout: RolloutConfig, model: str | Path, **args: Unpack[ModelArgs]) -> VLLMSettings:
        """From `actor_rollout_ref.rollout`."""
        kwargs = dict(rollout.engine_kwargs.vllm)
        if rollout.cudagraph_capture_sizes is not None:
            kwargs.setdefault("cudagraph_capture_sizes", rollout.cudagraph_capture_sizes)
        if rollout.quantization is not None:
            kwargs.setdefault("quantization", rollout.quantization)
        if rollout.mm_processor_kwargs:
            kwargs.setdefault("mm_processor_kwargs", dict(rollout.mm_processor_kwargs))
        if rollout.limit_images is not None:
            kwargs.setdefault("limit_mm_per_prompt", {"image": rollout.limit_images})
        if rollout.expert_parallel_size > 1:
            kwargs.setdefault("enable_expert_parallel", True)
        return cls(
            **shared_settings(rollout, model, **args),
            scheduling_policy=rollout.scheduling_policy,
            # Under an adapter the base is never sent, so it must survive a sleep.
            sleep_level=1 if kwargs.get("enable_lora") else 2,
            engine_kwargs=kwargs,
        )

    def vllm_arguments(self, *, cpu: bool, **placement: Any) -> dict[str, Any]:
        """Keywords of vLLM's `EngineArgs`. `placement` is how its processes are laid out."""
        self.refuse_fixed("vllm", _OURS)
        sees_images = _sees_images(self.model)
        arguments: dict[str, Any] = {name: getattr(self, name) for name in _SAME_ARGUMENTS} | {
            # vLLM refuses a budget under one token for each sequence.
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
            # Dummy weights go into buffers too. Those that scale pixels are in no checkpoint, so no update would bring
            # them back (seen in 0.32).
            "load_format": "auto" if sees_images and self.load_format == "dummy" else self.load_format,
            # vLLM's processor of images finds placeholders with a tokenizer, and is built whatever is asked later.
            "skip_tokenizer_init": self.skip_tokenizer_init and not sees_images,
            "hf_overrides": dict(self.override_config) or None,
            "logprobs_mode": _LOGPROBS_MODE[self.logprobs],
            "worker_extension_cls": EXTENSION,
            "enable_sleep_mode": self.enable_sleep and not cpu,
            **placement,
        }
        if self._graphs_stop_short(cpu=cpu):
            arguments["max_cudagraph_capture_size"] = self.max_num_seqs
        if cpu:
            arguments |= self._on_cpu(arguments["max_num_batched_tokens"])
        return self.with_engine_kwargs(arguments)

    def _on_cpu(self, budget: int) -> dict[str, Any]:
        """Compiling takes minutes and gains nothing measurable; a share of the machine's memory would be a lot.

        vLLM dies when it cuts a prompt with a seed into steps: it rewinds the row's generator, which only CUDA's can
        (0.26 to 0.32). Whole prompts need room for the longest; without a length vLLM finds that itself.
        """
        return {
            "enforce_eager": True,
            "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": None if self.max_model_len is None else max(budget, self.max_model_len),
        }

    def _graphs_stop_short(self, *, cpu: bool) -> bool:
        """Whether vLLM left to itself would run its largest batches without graphs, a third slower on an H200."""
        chosen = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"} & set(
            self.engine_kwargs
        )
        return not cpu and not self.enforce_eager and not chosen and self.max_num_seqs > _LARGEST_GRAPH


def _sees_images(model: str) -> bool:
    config = Path(model) / "config.json"
    return config.exists() and "vision_config" in json.loads(config.read_text())
