"""Checkpoints of a run: the workers' state, the driver's state, and which one to continue from.

global_step_N/actor      sharded weights, optimizer, schedule, random state (and huggingface/ when asked for)
global_step_N/critic     the same of the critic
global_step_N/trainer.json   where the data stands, the KL coefficient, the number of prompts drawn, the step's metrics
global_step_N/surplus.pkl    groups that dynamic sampling carries over to the next step
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest import verify_folder
from dovetail.checkpoint.store import CheckpointStore
from dovetail.config.root import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.trainer.groups import RoleGroups

logger = logging.getLogger(__name__)

_DRIVER_STATE = "trainer.json"
_SURPLUS = "surplus.pkl"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was loaded into the workers."""

    step: int
    folder: Path
    state: dict[str, Any]
    metrics: dict[str, float]


class TrainerCheckpoints:
    """Saves and loads through the groups. Folders are whole or absent."""

    def __init__(self, config: DovetailConfig) -> None:
        self._config = config
        self._loaded: Path | None = None
        self._store = CheckpointStore(config.trainer.run_dir, max_to_keep=config.trainer.max_actor_ckpt_to_keep)

    def save(self, step: int, groups: RoleGroups, state: dict[str, Any], *, surplus: DataProto | None = None) -> Path:
        """Write everything a resumed run needs; the folder appears when all of it is there."""
        with self._store.saving(step, world_size=self._config.trainer.world_size) as folder:
            groups.actor_rollout.save_checkpoint(str(folder / "actor"))
            if "hf_model" in self._config.actor_rollout_ref.actor.checkpoint.save_contents:
                groups.actor_rollout.export_model(str(folder / "actor" / "huggingface"))
            if groups.critic is not None:
                groups.critic.save_checkpoint(str(folder / "critic"))
            if surplus is not None:
                surplus.save_to_disk(folder / _SURPLUS)
            (folder / _DRIVER_STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        return self._store.folder(step)

    def load(self, groups: RoleGroups) -> FoundCheckpoint | None:
        """Load what `trainer.resume_mode` says into the workers; None: the run starts from the beginning."""
        folder = self._chosen()
        if folder is None:
            return None
        self._loaded = folder
        state = json.loads((folder / _DRIVER_STATE).read_text())
        groups.actor_rollout.load_checkpoint(str(folder / "actor"))
        if groups.critic is not None:
            groups.critic.load_checkpoint(str(folder / "critic"))
        return FoundCheckpoint(int(state.pop("step")), folder, state, state.pop("metrics"))

    def load_surplus(self) -> DataProto:
        """The carried-over groups of the checkpoint that was loaded."""
        assert self._loaded is not None, "load comes first"
        return DataProto.load_from_disk(self._loaded / _SURPLUS)

    def _chosen(self) -> Path | None:
        settings = self._config.trainer
        if settings.resume_mode == "disable":
            return None
        if settings.resume_mode == "auto":
            return self._store.latest()
        folder = Path(settings.resume_from_path or "").expanduser()
        if settings.resume_from_path is None or not folder.is_dir():
            raise FileNotFoundError(
                f"trainer.resume_from_path={settings.resume_from_path} is no folder; give a global_step_N folder, or "
                "set trainer.resume_mode=auto."
            )
        verify_folder(folder)
        return folder
