"""Settings that vLLM and SGLang have in common, and how they are read from `rollout`. Names no library's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dovetail.config.fsdp import full_dtype
from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import LogprobsMode, ModelArgs


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`engine_kwargs` go to the library as they are and win over what is derived here.

    `override_config` holds fields that the trainer changes in the folder's config: the engine's model is built, and its
    weights are expected, with the same.
    `logprobs` is what the engine's log-probs mean (`dovetail.rollout.base`); a library has one meaning per engine.
    `load_format="dummy"` loads no weights: nothing is generated before the first `update_weights`.
    """

    model: str
    dtype: str = "bfloat16"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    load_format: str = "auto"
    disable_log_stats: bool = True
    skip_tokenizer_init: bool = True
    trust_remote_code: bool = False
    seed: int = 0
    logprobs: LogprobsMode = "temperature"
    enable_sleep: bool = True
    override_config: Mapping[str, Any] = field(default_factory=dict)
    external_lib: str | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_args(self) -> ModelArgs:
        return {
            "trust_remote_code": self.trust_remote_code,
            "override_config": self.override_config,
            "external_lib": self.external_lib,
        }

    def refuse_fixed(self, library: str, reasons: Mapping[str, str]) -> None:
        """ValueError where `engine_kwargs` has an argument that dovetail decides; `reasons` by its name."""
        for name, reason in reasons.items():
            if name in self.engine_kwargs:
                raise ValueError(f"engine_kwargs.{library}.{name} cannot be set: {reason}.")

    def with_engine_kwargs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The library's arguments: those derived, `engine_kwargs` over them, None left to the library."""
        return {name: value for name, value in {**arguments, **self.engine_kwargs}.items() if value is not None}


_SAME_KEYS = (
    *("kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager"),
    *("enable_chunked_prefill", "enable_prefix_caching", "load_format", "disable_log_stats", "skip_tokenizer_init"),
)


def shared_settings(
    rollout: RolloutConfig,
    model: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    external_lib: str | None = None,
) -> dict[str, Any]:
    """Fields of `EngineSettings` that `actor_rollout_ref.rollout` and the model set, whatever the library."""
    return {name: getattr(rollout, name) for name in _SAME_KEYS} | {
        "model": str(model),
        "dtype": full_dtype(rollout.dtype),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": rollout.context_length,
        "logprobs": logprobs_of(rollout),
        "enable_sleep": rollout.free_cache_engine is not False,
        "trust_remote_code": trust_remote_code,
        "override_config": dict(override_config or {}),
        "external_lib": external_lib,
    }


def logprobs_of(rollout: RolloutConfig) -> LogprobsMode:
    """`processed_logprobs` is served as "temperature": the same where nothing is filtered, what a trainer recomputes
    where something is."""
    return "raw" if rollout.logprobs_mode == "raw_logprobs" else "temperature"


def runs_on_cpu() -> bool:
    return not torch.cuda.is_available()
