"""Checkpoints of a run: the workers' state, the driver's state, and which one to continue from.

global_step_N/actor      sharded weights, optimizer, schedule, random state (and huggingface/ when asked for)
global_step_N/critic     the same of the critic
global_step_N/trainer.json   where the data stands, the KL coefficient, the number of prompts drawn, the step's metrics
global_step_N/manifest.json  every file, with size and checksum, and the value of `trainer.save_best`; written last
global_step_N/surplus.safetensors   groups that dynamic sampling carries over to the next step
global_step_N/stream_*.safetensors  of `rollout_stream`: groups that wait for a step, and unfinished ones

With `checkpoint.async_save` workers write a copy of their state while training goes on. The folder gets its manifest
and its name when all have written it; until then, the checkpoint before it is the newest.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest import BrokenCheckpoint, verify_folder
from dovetail.checkpoint.score import Score, score_of
from dovetail.checkpoint.store import CheckpointStore
from dovetail.config import ConfigError
from dovetail.config.actor import CheckpointConfig
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerError, WorkerGroup
from dovetail.observability.disk import DiskFullError, free_bytes, is_full_disk
from dovetail.protocol import DataProto
from dovetail.trainer.groups import TrainedGroups

logger = logging.getLogger(__name__)

_DRIVER_STATE = "trainer.json"
_CARRIED = ".safetensors"
_GENERATING = {"rl", "distill"}
"""Methods that read prompts alike: a run of one may go on as the other."""
_MIB = 1 << 20


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was loaded into the workers."""

    step: int
    folder: Path
    state: dict[str, Any]
    metrics: dict[str, float]


@dataclass
class _OpenSave:
    """A save that some groups are still writing."""

    step: int
    writing: list[WorkerGroup] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    """Folder of each role, and the number of ranks that write into it."""
    score: Score | None = None


class TrainerCheckpoints:
    """Saves and loads through the groups. A folder is complete or absent."""

    def __init__(self, config: DovetailConfig) -> None:
        self._config = config
        self.carried: dict[str, DataProto] = {}
        """Of the checkpoint that was loaded: what belongs to later steps, by the name of its file."""
        self._store = CheckpointStore(config.trainer.run_dir, max_to_keep=config.trainer.max_actor_ckpt_to_keep)
        self._open: _OpenSave | None = None
        self._validated = False

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint, if it can be read."""
        mode = self._config.trainer.resume_mode
        return mode == "resume_path" or (mode == "auto" and bool(self._store.steps()))

    def save(
        self, step: int, groups: TrainedGroups, state: dict[str, Any], *, carried: Mapping[str, DataProto] | None = None
    ) -> list[int]:
        """Write what a resumed run needs; returns the steps whose checkpoints this call completed.

        Waits for a save that still runs in the background.
        """
        finished = self.finish()
        settings = {"actor": self._config.actor_rollout_ref.actor.checkpoint, "critic": self._config.critic.checkpoint}
        with self._complete_or_absent(step):
            folder = self._store.begin(step)
            save = _OpenSave(step, score=self._score(state["metrics"]))
            for name, group in groups.trained.items():
                self._save_role(group, settings[name], folder / name, save)
            for name, rows in (carried or {}).items():
                rows.save_to_disk(folder / f"{name}{_CARRIED}")
            (folder / _DRIVER_STATE).write_text(
                json.dumps({"step": step, "method": self._config.trainer.method, **state}, indent=1)
            )
        self._open = save
        return [*finished, *(self.finish() if not save.writing else [])]

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these metrics was validated as better than every checkpoint (`trainer.save_best`)."""
        score = self._score(metrics)
        others = [*self._store.scores().values(), *([self._open.score] if self._open and self._open.score else [])]
        return score is not None and all(score.beats(other) for other in others)

    def check_validation(self, metrics: Mapping[str, float]) -> None:
        """Refuse a `trainer.save_best` that the first validation, with these metrics, does not report."""
        wanted, is_first = self._config.trainer.save_best, not self._validated
        self._validated = self._validated or bool(metrics)
        if wanted is None or wanted in metrics or not (is_first and metrics):
            return
        close = difflib.get_close_matches(wanted, metrics, n=1, cutoff=0.0)
        near = f"; did you mean {close[0]}?" if close else "."
        why = f"trainer.save_best={wanted} is no metric of the validation{near} It has {', '.join(sorted(metrics))}."
        raise ConfigError([Problem("trainer.save_best", why)])

    def _score(self, metrics: Mapping[str, float]) -> Score | None:
        settings = self._config.trainer
        return score_of(metrics, settings.save_best, settings.best_mode)

    def poll(self) -> list[int]:
        """Finish the save in the background if all of it is written; never waits."""
        if self._open is None or any(any(group.is_saving()) for group in self._open.writing):
            return []
        return self.finish()

    def finish(self) -> list[int]:
        """Wait for the save in the background, if there is one, and complete its folder."""
        save, self._open = self._open, None
        if save is None:
            return []
        with self._complete_or_absent(save.step):
            for group in save.writing:
                group.finish_saving()
            extra = save.score.as_extra() if save.score else None
            self._store.commit(save.step, world_size=self._config.trainer.world_size, parts=save.parts, extra=extra)
        self._store.prune()
        return [save.step]

    def load(self, groups: TrainedGroups) -> LoadedCheckpoint | None:
        """Load what `trainer.resume_mode` says into the workers; None: the run starts from the beginning.

        With `auto`, a damaged checkpoint is named in a warning and the next older one is taken. One that was asked for
        by path is an error.
        """
        first_problem: BrokenCheckpoint | None = None
        for folder in self._chosen():
            try:
                return self._load(folder, groups)
            except BrokenCheckpoint as problem:
                if self._config.trainer.resume_mode != "auto" or not problem.damaged:
                    raise
                logger.warning("%s; trying an older one", problem)
                first_problem = first_problem or problem
        if first_problem is not None:
            raise first_problem
        return None

    def _load(self, folder: Path, groups: TrainedGroups) -> LoadedCheckpoint:
        try:
            state = json.loads((folder / _DRIVER_STATE).read_text())
            step, metrics = int(state.pop("step")), state.pop("metrics")
            files = sorted(folder.glob(f"*{_CARRIED}"))
            self.carried = {file.stem: DataProto.load_from_disk(file) for file in files}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenCheckpoint(folder, f"the driver's state is not readable ({error})", damaged=True) from error
        method, own = state.pop("method", None), self._config.trainer.method
        if method is not None and method != own and not {method, own} <= _GENERATING:
            raise BrokenCheckpoint(
                folder,
                f"it is of a run with trainer.method={method}, and this one has {own}; give this run a folder of its "
                "own (output=), or start over in this one with trainer.resume_mode=disable. To train its model on, "
                "`dovetail export` it",
            )
        if missing := [name for name in groups.trained if not (folder / name).is_dir()]:
            raise BrokenCheckpoint(
                folder,
                f"the run that saved it trained no {missing[0]}, and this one does; `dovetail export` it and start a "
                "new run from that folder",
            )
        for name, group in groups.trained.items():
            _load_role(group, folder / name)
        return LoadedCheckpoint(step, folder, state, metrics)

    def _save_role(self, group: WorkerGroup, settings: CheckpointConfig, folder: Path, save: _OpenSave) -> None:
        if "hf_model" in settings.save_contents:
            group.export_model(str(folder / "huggingface"))
        group.save_checkpoint(str(folder), background=settings.async_save)
        save.parts[folder.name] = group.world_size
        if settings.async_save:
            save.writing.append(group)

    @contextmanager
    def _complete_or_absent(self, step: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            folder = self._store.folder(step)
            # Libraries lose the reason on the way up; a disk without a free MiB speaks for itself.
            is_full = is_full_disk(error) or free_bytes(folder) < _MIB
            needed = self._store.bytes_needed(step)
            self._store.discard(step)
            if is_full:
                raise DiskFullError(folder, needed=needed, advice=self._advice()) from error
            raise

    def _advice(self) -> str:
        try:
            latest = self._store.latest(checksums=False)
        except BrokenCheckpoint:  # none is complete; the error that is being explained matters more
            latest = None
        kept = f"; {latest} is complete, and the run continues from it when started again" if latest else ""
        return (
            "free some space, set trainer.max_actor_ckpt_to_keep to keep fewer checkpoints, or set "
            f"trainer.default_local_dir to another disk{kept}"
        )

    def _chosen(self) -> Iterator[Path]:
        """Folders to continue from, the first that can be read."""
        settings = self._config.trainer
        if settings.resume_mode == "auto":
            yield from self._store.complete()
        elif settings.resume_mode == "resume_path":
            folder = Path(settings.resume_from_path or "").expanduser()
            if settings.resume_from_path is None or not folder.is_dir():
                raise FileNotFoundError(
                    f"trainer.resume_from_path={settings.resume_from_path} is no folder; give a global_step_N folder, "
                    "or set trainer.resume_mode=auto."
                )
            verify_folder(folder)
            yield folder


def _load_role(group: WorkerGroup, folder: Path) -> None:
    try:
        group.load_checkpoint(str(folder))
    except WorkerError as error:
        if isinstance(error.exception, BrokenCheckpoint):
            raise error.exception from None  # its message says it all; the worker's traceback adds nothing
        raise
