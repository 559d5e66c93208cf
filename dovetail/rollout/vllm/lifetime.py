"""Start vLLM's engine inside this process and take it down again without pulling the rest of the process along.

vLLM takes for granted that the process is its own: it seeds every random generator, sets the precision of float32
products, and its shutdown destroys the default process group, whoever made it. Here it shares the process with a
trainer, and with other engines.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dovetail.rollout.vllm.environment import starting_processes, without_compiling
from dovetail.rollout.vllm.settings import VLLMSettings


def start_engine(settings: VLLMSettings, *, cpu: bool) -> Any:
    """A vLLM `LLMEngine` whose core is in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    placement: dict[str, Any] = {}
    if dist.is_initialized() and not _process.groups_are_vllms and dist.get_world_size() > 1:
        # vLLM builds its groups out of the world that is there; it reads its place in it from the environment.
        placement["distributed_executor_backend"] = "external_launcher"
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("LOCAL_RANK", "0")
        if not cpu:
            # vLLM takes `cuda:LOCAL_RANK` for its device: the one that the trainer in this process computes on.
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    had_groups = dist.is_initialized()
    try:
        with _torch_state_kept(), starting_processes(cpu=cpu), without_compiling(cpu=cpu):
            config = EngineArgs(**settings.vllm_arguments(cpu=cpu, **placement)).create_engine_config()
            executor_class = Executor.get_class(config)
            if placement:
                from dovetail.rollout.vllm.launcher import NamedLauncher

                executor_class = NamedLauncher
            log_stats = not settings.disable_log_stats
            llm = LLMEngine(config, executor_class=executor_class, log_stats=log_stats, multiprocess_mode=False)
    finally:
        _process.groups_are_vllms |= dist.is_initialized() and not had_groups
    finalizer = getattr(llm.engine_core, "_finalizer", None)
    if finalizer is not None:
        # It would run vLLM's own shutdown when an engine that nobody closed is collected, and end all engines' groups.
        finalizer.detach()
    _process.num_engines += 1
    return llm


def shut_down(llm: Any) -> None:
    """End one engine. vLLM's process groups go with the last one, the trainer's never."""
    core = llm.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _process.num_engines -= 1
    if _process.num_engines:
        return
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    if _process.groups_are_vllms:
        destroy_distributed_environment()
        _process.groups_are_vllms = False


@dataclass(slots=True)
class _Process:
    """What vLLM has in this process. Its process groups are global, so their count must be too."""

    num_engines: int = 0
    groups_are_vllms: bool = False


_process = _Process()


@contextmanager
def _torch_state_kept() -> Iterator[None]:
    """vLLM seeds python, numpy and torch when it starts, and its CUDA and CPU workers set torch's float32 precision
    (VLLM_FLOAT32_MATMUL_PRECISION). Both belong to the trainer it shares the process with."""
    python, array, precision = random.getstate(), np.random.get_state(), torch.get_float32_matmul_precision()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        random.setstate(python)
        np.random.set_state(array)
