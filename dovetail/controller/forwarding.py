"""Which environment variables of the driver reach the workers, and how. Starts nothing.

On one machine workers inherit them; on a cluster they inherit those of the Ray daemon of their node, so they are sent.
Secrets never go through Ray's `runtime_env`, which Ray writes into its logs: they are handed to each process in a call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dovetail.config.ray_init import is_secret

FORWARDED_PREFIXES = (
    "CUBLAS_",
    "CUDNN_",
    "DOVETAIL_",
    "FI_",
    "FLASHINFER_",
    "GLOO_",
    "HF_",
    "HUGGINGFACE_",
    "HUGGING_FACE_",
    "MKL_",
    "NCCL_",
    "NVTE_",
    "OMP_",
    "PYTORCH_",
    "SGLANG_",
    "SGL_",
    "TOKENIZERS_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRANSFORMERS_",
    "TRITON_",
    "UCX_",
    "VLLM_",
)
"""Variables of the driver that every worker gets too."""

FORWARDED_NAMES = frozenset({"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"})
"""By name: other CUDA_* variables (which devices, which folder) belong to a node."""

# Ray would set OMP_NUM_THREADS from the actor's num_cpus.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}


def forwarded_variables() -> dict[str, str]:
    """The driver's variables that workers need, secrets included."""
    chosen = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES
    }
    return {**_DEFAULTS, **chosen}


def merged_runtime_env(runtime_env: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The user's `runtime_env` with the driver's variables in it; the user's own values win. Adds no secret."""
    forwarded = {name: value for name, value in forwarded_variables().items() if not is_secret(name)}
    return {**runtime_env, "env_vars": {**forwarded, **(env or {}), **runtime_env.get("env_vars", {})}}


def secrets() -> dict[str, str]:
    """The driver's secrets that workers need."""
    return {name: value for name, value in forwarded_variables().items() if is_secret(name)}


def take_secrets(values: Mapping[str, str]) -> None:
    """In the worker: values from the user's `runtime_env`, or of the node itself, stay."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
