"""How an SGLang engine is set up, and the arguments SGLang gets. Starts nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import ModelArgs
from dovetail.rollout.engine_settings import EngineSettings, shared_settings

_OURS = {
    "model_path": "the run's model is served",
    "host": "servers listen on loopback only",
    "port": "ports are bound by the engine, never chosen",
    "nccl_port": "ports are bound by the engine, never chosen",
    "dist_init_addr": "an engine lives on one machine",
    "nnodes": "an engine lives on one machine",
    "dp_size": "SGLang takes no weight updates then; use rollout.num_servers",
    "weight_version": "it comes with every weight update",
    "enable_memory_saver": "rollout.free_cache_engine decides",
}
_NO_UPDATES_ON_CPU = "intel_amx"
_CPU_MIN_TOKENS = 16384
_KEPT_BY_SGLANG = 8
"""SGLang takes no prompt that comes within six tokens of the context, and ends responses two tokens before it."""


@dataclass(frozen=True, slots=True)
class SGLangSettings(EngineSettings):
    """The fields that only SGLang has; `engine_kwargs` are fields of its `ServerArgs`.

    `logprobs` is "temperature" or "raw"; SGLang chooses between them once per process. `attention_backend=None` leaves
    it to SGLang on CUDA (fa3, flashinfer and others) and is torch_native on CPU. `deterministic` makes seeds count
    (CUDA only).
    """

    attention_backend: str | None = None
    deterministic: bool = False
    base_gpu_id: int = 0

    @classmethod
    def from_config(
        cls, rollout: RolloutConfig, model: str | Path, *, device: torch.device, **args: Unpack[ModelArgs]
    ) -> SGLangSettings:
        """From `actor_rollout_ref.rollout`."""
        kwargs = dict(rollout.engine_kwargs.sglang)
        if rollout.cudagraph_capture_sizes is not None:
            kwargs.setdefault("cuda_graph_bs", rollout.cudagraph_capture_sizes)
        if rollout.expert_parallel_size > 1:
            kwargs.setdefault("ep_size", rollout.expert_parallel_size)
        return cls(
            **shared_settings(rollout, model, **args),
            attention_backend=kwargs.pop("attention_backend", None),
            deterministic=bool(kwargs.pop("enable_deterministic_inference", False)),
            base_gpu_id=device.index or 0 if device.type == "cuda" else 0,
            engine_kwargs=kwargs,
        )

    def sglang_arguments(self, *, cpu: bool) -> dict[str, Any]:
        """Keywords of SGLang's `ServerArgs`, but for ports."""
        self.refuse_fixed("sglang", _OURS)
        arguments: dict[str, Any] = {
            "model_path": self.model,
            "host": "127.0.0.1",
            "dtype": self.dtype,
            "kv_cache_dtype": "fp8_e4m3" if self.kv_cache_dtype == "fp8" else "auto",
            "tp_size": self.tensor_parallel_size,
            "context_length": None if self.max_model_len is None else self.max_model_len + _KEPT_BY_SGLANG,
            "max_running_requests": self.max_num_seqs,
            "chunked_prefill_size": self.max_num_batched_tokens if self.enable_chunked_prefill else -1,
            "mem_fraction_static": self.gpu_memory_utilization,
            "disable_cuda_graph": self.enforce_eager,
            "disable_radix_cache": not self.enable_prefix_caching,
            "load_format": self.load_format,
            "attention_backend": self.attention_backend,
            "enable_deterministic_inference": self.deterministic,
            "skip_tokenizer_init": self.skip_tokenizer_init,
            "trust_remote_code": self.trust_remote_code,
            "json_model_override_args": json.dumps(dict(self.override_config)) if self.override_config else None,
            "random_seed": self.seed,
            "base_gpu_id": self.base_gpu_id,
            "enable_memory_saver": self.enable_sleep and not cpu,
            # Its warm-up generates text from weights that may be a dummy's, and needs a tokenizer.
            "skip_server_warmup": True,
            # Between batches the scheduler polls otherwise: a sixth of a core, while the trainer computes.
            "sleep_on_idle": True,
            "log_level": "error" if self.disable_log_stats else "info",
        }
        if cpu:
            arguments |= self._on_cpu()
        return self.with_engine_kwargs(arguments)

    def _on_cpu(self) -> dict[str, Any]:
        if self.attention_backend == _NO_UPDATES_ON_CPU:
            raise ValueError(
                f"engine_kwargs.sglang.attention_backend={_NO_UPDATES_ON_CPU} packs its weights, and SGLang writes "
                "updates into the packed copies without packing them: the model is garbage then. Use torch_native."
            )
        if self.attention_backend not in (None, "torch_native"):
            raise ValueError(
                f"engine_kwargs.sglang.attention_backend={self.attention_backend} needs CUDA; on CPU use torch_native."
            )
        if self.deterministic:
            raise ValueError(
                "engine_kwargs.sglang.enable_deterministic_inference=True needs CUDA: the seeded sampler is a kernel."
            )
        context = self.max_model_len or 0
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            # It hands work to a second stream, which a CPU does not have.
            "disable_overlap_schedule": True,
            # A share of the machine's memory would be a lot.
            "max_total_tokens": max(_CPU_MIN_TOKENS, 2 * context),
        }
