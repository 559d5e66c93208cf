"""What every role with a backend does the same way: meet its peers, place itself, offload between calls, checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dovetail.backends.base import TrainBackend
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.checkpoint.sharded import CONTENTS, read_description
from dovetail.config.checkpoint import CheckpointConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, Worker, register
from dovetail.workers.device_peak import device_peak
from dovetail.workers.step_trace import StepTrace

logger = logging.getLogger(__name__)


class TrainingRole(Worker):
    """A worker that holds backends. Subclasses build them in `init_model`."""

    config: DovetailConfig
    _trace: StepTrace | None = None

    def join_group(
        self, *, timeout_seconds: int, float32_matmul_precision: str = "highest", full_determinism: bool = False
    ) -> None:
        """Meet the other ranks. Roles that share a process share the group, so a second call finds it made."""
        if full_determinism:
            _compute_deterministically()
        torch.set_float32_matmul_precision(float32_matmul_precision)
        if self.world_size > 1 and not dist.is_initialized():
            self.init_process_group(timeout=timedelta(seconds=timeout_seconds))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_peak(self, dtype: str) -> float | None:
        """FLOP/s that this process's device can reach in `dtype`; None when that is not known."""
        return device_peak(self.device, getattr(torch, dtype))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, folder: str, step: int) -> None:
        """Begin a trace of this process, which plays all roles, if `global_profiler` names its rank."""
        if self.config.global_profiler.profiles(self.rank):
            self._trace = StepTrace(Path(folder) / f"step_{step}_rank_{self.rank}.pt.trace.json.gz", self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str | None:
        """Write the trace; returns its path, or None where none was begun."""
        trace, self._trace = self._trace, None
        return None if trace is None else trace.finish()

    def place_in_mesh(self, name: str, backend: TrainBackend) -> None:
        """Ranks that share sequences or layers get the same rows; one of them answers."""
        rank_info = backend.rank_info
        self._register_dispatch_collect_info(name, rank_info.dp_rank, rank_info.is_collected)


def _compute_deterministically() -> None:
    # cuBLAS reads this once, when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # An operation that has no deterministic form is named in a warning: a run that has one is better than none.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def save_role(
    backend: TrainBackend, folder: Path, settings: CheckpointConfig, *, extra: Mapping[str, Any], background: bool
) -> None:
    """Write what `checkpoint.save_contents` names; `background` returns when there is a copy to write from."""
    save = backend.start_save if background else backend.save_state
    save(folder, extra=extra, contents=settings.save_contents)


def load_role(backend: TrainBackend, folder: Path, settings: CheckpointConfig) -> dict[str, Any]:
    """Read what `checkpoint.load_contents` names, or all that was saved; returns the role's own `extra`."""
    saved = read_description(folder)["contents"]
    asked = saved if settings.load_contents is None else settings.load_contents
    wanted = [name for name in CONTENTS if name in asked]
    if settings.load_contents is None and "model" not in saved:
        raise BrokenCheckpoint(
            folder,
            "it was saved without model (checkpoint.save_contents), so there is no state to continue from; set "
            "trainer.resume_mode=disable, and model.path to its huggingface folder if it has one",
        )
    left_out = [name for name in CONTENTS if name not in wanted]
    if left_out:
        logger.warning("%s: %s not loaded; the run does not continue exactly", folder, ", ".join(left_out))
    return backend.load_state(folder, contents=wanted)


@contextmanager
def loaded(backend: TrainBackend, settings: FSDPConfig | MegatronConfig, *, trains: bool = False) -> Iterator[None]:
    """The weights (and the optimizer when `trains`) are on the device inside, and back on the host after."""
    backend.onload(params=settings.param_offload, optimizer=settings.optimizer_offload and trains)
    try:
        yield
    finally:
        backend.offload(params=settings.param_offload, optimizer=settings.optimizer_offload and trains)
