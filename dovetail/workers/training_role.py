"""What every role with a backend does the same way: join the process group, register its mesh, offload, checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist

from dovetail.agents.stops import run_stop_ids
from dovetail.backends.base import TrainBackend
from dovetail.backends.export import export_hf_folder
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.checkpoint.sharded import CONTENTS, read_description
from dovetail.config.actor import ActorConfig, CheckpointConfig
from dovetail.config.critic import CriticConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import ModelConfig
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import import_user_modules
from dovetail.controller import Dispatch, Worker, register
from dovetail.models.load import load_tokenizer, model_folder
from dovetail.workers.device_peak import device_peak
from dovetail.workers.step_trace import StepProfile, start_step_profile

logger = logging.getLogger(__name__)


class TrainingRole(Worker):
    """A worker that holds backends. Subclasses build them in `init_model`."""

    _profile: StepProfile | None = None

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__()
        # Losses and engines that a run names may be registered there.
        import_user_modules(config.trainer.import_modules)
        self.config = config

    def join_group(self, nccl_timeout: int | None = None) -> None:
        """Compute as the run says, and join the process group, with the role's own timeout in seconds if it has one.

        Roles that share a process share the group: a second call does nothing.
        """
        if self.config.trainer.full_determinism:
            _compute_deterministically()
        torch.set_float32_matmul_precision(self.config.trainer.float32_matmul_precision)
        seconds = nccl_timeout or self.config.actor_rollout_ref.nccl_timeout
        if self.world_size > 1 and not dist.is_initialized():
            self.init_process_group(timeout=timedelta(seconds=seconds))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_peak(self, dtype: str) -> float | None:
        """FLOP/s that this process's device can reach in `dtype`; None when that is not known."""
        return device_peak(self.device, getattr(torch, dtype))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, folder: str, step: int) -> None:
        """Begin to profile this process, which plays all roles, if `global_profiler` names its rank."""
        settings = self.config.global_profiler
        if settings.tool is not None and settings.profiles(self.rank):
            stem = Path(folder) / f"step_{step}_rank_{self.rank}"
            self._profile = start_step_profile(settings.tool, stem, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str | None:
        """Write the profile; returns its path, or None where none was begun."""
        profile, self._profile = self._profile, None
        return None if profile is None else profile.finish()

    def register_in_mesh(self, name: str, backend: TrainBackend) -> None:
        """Ranks that share sequences or layers get the same rows; one of them answers."""
        rank_info = backend.rank_info
        self._register_dispatch_collect_info(name, rank_info.dp_rank, rank_info.is_collected)


class Trained(Protocol):
    """What a role trains: a backend, and how many updates it has had."""

    backend: TrainBackend
    num_updates: int


class CheckpointedRole(TrainingRole):
    """A role that is trained: saves, loads and exports what it trains, as its section of the configuration says."""

    @property
    def _trained(self) -> Trained:
        raise NotImplementedError

    _trains: ClassVar[Literal["actor", "critic"]] = "actor"
    """Which section of the configuration says how; also the first part of the names of its metrics."""

    @property
    def _section(self) -> ActorConfig | CriticConfig:
        return self.config.actor_rollout_ref.actor if self._trains == "actor" else self.config.critic

    @property
    def _model(self) -> ModelConfig:
        return self.config.actor_rollout_ref.model if self._trains == "actor" else self.config.critic.model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, extra: dict[str, Any] | None = None, *, background: bool = False
    ) -> None:
        """Write this rank's part of `checkpoint.save_contents`; `background`: from a copy, while training goes on."""
        backend, settings = self._trained.backend, self._section.checkpoint
        own = {"num_updates": self._trained.num_updates, **(extra or {})}
        if self._model.uses_lora:
            own["lora_alpha"] = self._model.lora_alpha
        with loaded(backend, self._section.offloading, trains=True):
            save = backend.start_save if background else backend.save_state
            save(Path(local_path), extra=own, contents=settings.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_saving(self) -> bool:
        """Whether a save in the background is not written yet."""
        return self._trained.backend.is_saving()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_saving(self) -> None:
        """Wait for the save in the background; raises what went wrong in it."""
        self._trained.backend.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, on any number of processes; returns its `extra`.

        A run that only validates reads the weights alone.
        """
        backend, trains = self._trained.backend, not self.config.trainer.val_only
        with loaded(backend, self._section.offloading, trains=trains):
            if not trains:
                return backend.load_state(Path(local_path), contents=("model",))
            extra = load_contents(backend, Path(local_path), self._section.checkpoint)
        self._trained.num_updates = extra.pop("num_updates", 0)
        # The adapters' tensors do not tell by how much they count.
        if (saved := extra.pop("lora_alpha", None)) not in (None, own := self._model.lora_alpha):
            raise BrokenCheckpoint(
                Path(local_path),
                f"its adapters were trained with lora_alpha={saved} and this run's lora_alpha={own} would scale them; "
                f"set lora_alpha={saved}, or `dovetail export` it and start from that folder",
            )
        return extra

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, out: str, dtype: str | None = None) -> None:
        """Write the model as a Hugging Face folder, adapters merged."""
        model, is_policy = self._model, self._trains == "actor"
        # Also of a critic: the conversations that it has read are the policy's.
        template = self.config.actor_rollout_ref.model.custom_chat_template
        tokenizer = load_tokenizer(
            self.config.tokenizer_source if is_policy else model.tokenizer_source,
            trust_remote_code=model.trust_remote_code,
            chat_template=template,
        )
        wanted = None if dtype is None else getattr(torch, dtype)
        # Of a policy also other files of its folder, see `save_hf_folder`.
        source = model_folder(model.path) if is_policy else None
        stop_ids = run_stop_ids(self.config, tokenizer).all if is_policy else ()
        settings = {"tokenizer": tokenizer, "dtype": wanted, "source": source, "stop_ids": stop_ids}
        with loaded(self._trained.backend, self._section.offloading):
            export_hf_folder(self._trained.backend, Path(out), **settings)


def _compute_deterministically() -> None:
    # cuBLAS reads this once, when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only warn for an operation without a deterministic form, instead of failing the run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def load_contents(backend: TrainBackend, folder: Path, settings: CheckpointConfig) -> dict[str, Any]:
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
