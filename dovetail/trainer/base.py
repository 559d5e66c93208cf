"""`BaseTrainer`: the driver's loop under every method. Steps, stops, checkpoints, records; knows no rows and no loss.

A method says what a step is (`_train_step`), how it validates, and which part of a checkpoint is its own.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from dovetail.checkpoint.store import CheckpointStore
from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerError
from dovetail.controller.freeze_gc import frozen_gc
from dovetail.data.build import PromptLoader
from dovetail.models.flops import StepUtilisation
from dovetail.observability.stalls import StalledError
from dovetail.observability.timers import PhaseTimers
from dovetail.observability.tracker import Tracker
from dovetail.protocol import DataProto
from dovetail.trainer.checkpoints import LoadedCheckpoint, TrainerCheckpoints
from dovetail.trainer.groups import TrainedGroups
from dovetail.trainer.profile import profiled
from dovetail.trainer.stalled import SkippedSteps
from dovetail.trainer.stopping import StopAfterPhase, StopRequest
from dovetail.trainer.timeline import TimelineRow, take_timeline

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
Groups = TypeVar("Groups", bound=TrainedGroups)
EngineSpans = list[list[tuple[str, float, float]]]

_NOTE_WAITS_S = 5.0
"""How long a phase lasts before the run folder says who waits for whom, and how often it is said anew."""
_WARM_UP_STEPS = 2
"""They compile kernels, capture graphs and fill caches; what they leave behind lives until the run ends."""


class BaseTrainer(ABC, Generic[Groups]):
    """Call `init_workers`, then `fit`. `last_step` ends the run before `total_steps`, which schedules count with."""

    def __init__(
        self,
        config: DovetailConfig,
        *,
        train_loader: PromptLoader,
        val_loader: PromptLoader | None,
        tracker: Tracker,
        create_groups: Callable[[], Groups],
        last_step: int | None = None,
        on_phase: Callable[[str | None], None] | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.stop = stop or StopRequest()
        self.tracker = tracker
        self.timers = PhaseTimers(self._phase_changed, after_phase=self.stop.phase_ended)
        self.checkpoints = TrainerCheckpoints(config)
        self.utilisation = StepUtilisation(config)
        self.global_step = 0
        self.total_steps = total_training_steps(config, len(train_loader))
        self._intervals = {
            "after_each_epoch": steps_of_an_epoch(config, len(train_loader)),
            "at_end": self.total_steps,
        }
        self._last_step = self.total_steps if last_step is None else min(self.total_steps, last_step)
        self._on_phase = on_phase
        self._present_phase: str | None = None
        self._phase_began = self._wait_noted_at = time.time()
        self._saved_step = 0
        self._last_metrics: Metrics = {}
        self._recorded: Exception | None = None
        self._skipped_steps = SkippedSteps(self.total_steps)
        self._create_groups = create_groups
        self._groups: Groups | None = None

    @property
    def groups(self) -> Groups:
        if self._groups is None:
            raise RuntimeError("init_workers has not been called.")
        return self._groups

    @property
    def has_workers(self) -> bool:
        return self._groups is not None

    def init_workers(self) -> None:
        """Start the processes and build the models in them."""
        with self._naming_failures():
            with self.timers("start_processes"):
                self._groups = self._create_groups()
            self._groups.processes.when_hung(self._end_hung)
            with self.timers("init_models"):
                self._init_models(self._groups)
        seconds = self.timers.take()  # not those of the first step; the timeline of step 0 has them
        logger.info("ready to train: %s", ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))

    def fit(self) -> Metrics:
        """Train to the last step, or validate alone; returns the last validation's metrics."""
        with self._naming_failures():
            return self._fit()

    def _fit(self) -> Metrics:
        settings = self.config.trainer
        self._load_checkpoint()
        last_validation: Metrics = {}
        if settings.val_only or (settings.val_before_train and self.global_step == 0):
            last_validation = self._timed_validation()
            seconds = self.timers.take()
            if last_validation:
                self.tracker.log(self.global_step, last_validation | seconds)
        if not settings.val_only:
            with frozen_gc() as freeze_gc, self.stop.training():
                last_validation = self._train(last_validation, freeze_gc)
                # First, and before a signal ends the run at once: what follows may fail, the last checkpoint is there.
                self._note_saved(self.checkpoints.finish())
        self._close()
        self._phase_changed(None)
        self._write_now(None, finished=self.stop.name is None, stopped=self.stop.name is not None)
        return last_validation

    # ---- what a method says ----

    @abstractmethod
    def _init_models(self, groups: Groups) -> None:
        """Build the models in the processes that have just started."""

    @abstractmethod
    def _train_step(self) -> Metrics:
        """One step, timed as the phase `step`."""

    @abstractmethod
    def _validate(self) -> Metrics:
        """Metrics of the held-out data; empty without any."""

    @abstractmethod
    def _driver_state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint. Keep it small and plain: it is written as JSON."""

    @abstractmethod
    def _load_driver_state(self, state: dict[str, Any]) -> None:
        """Continue from what `_driver_state` returned."""

    def _carried_over(self) -> dict[str, DataProto]:
        """Rows that are already made and belong to the next step, by the name of their file in a checkpoint."""
        return {}

    def _begin_step(self) -> None:
        """The step `global_step` begins."""

    def _undo_step(self) -> None:
        """The step that had begun was given up; `global_step` is the one before it."""

    def _checkpoint_parts(
        self, state: dict[str, Any], carried: dict[str, DataProto]
    ) -> tuple[dict[str, Any], dict[str, DataProto]]:
        """The driver's state and the carried rows as they are written; called when a checkpoint is."""
        return state, carried

    def _weights_loaded(self) -> None:
        """The workers hold the weights of `global_step`, from a checkpoint."""

    def _engine_spans(self) -> EngineSpans:
        """What engines on devices of their own have done since the last call."""
        return []

    def _close(self) -> None:
        """Nothing is trained after this."""

    # ---- the loop ----

    def _train(self, last_validation: Metrics, freeze_gc: Callable[[], None]) -> Metrics:
        """Every step that is left; returns the last validation's metrics. `freeze_gc` is called after warm-up."""
        settings = self.config.trainer
        started = self._take_timeline()
        if self.global_step == 0:
            self.tracker.folder.log_timeline(0, started)
        freeze_after = self.global_step + _WARM_UP_STEPS
        while self.global_step < self._last_step:
            before = self._driver_state(), self._carried_over()
            self.global_step += 1
            self.stop.begin_step()
            self._begin_step()
            learner, folder = self.groups.learner, self.tracker.folder.path
            try:
                with profiled(self.config.global_profiler, self.global_step, learner, folder):
                    metrics = self._train_step()
                if metrics.get("actor/skipped_steps", 0) or metrics.get("critic/skipped_steps", 0):
                    self.tracker.event("skipped_step", self.global_step)
            except StopAfterPhase:
                self.global_step -= 1
                self._undo_step()
                self._save_and_stop(*before)
                break
            if self._is_due(settings.test_freq):
                last_validation = self._timed_validation()
                metrics |= last_validation
            metrics |= self.timers.take()
            self._note_saved(self.checkpoints.poll())
            is_due = settings.save_freq not in (-1, 0) and self._is_due(settings.save_freq)
            if is_due or self.checkpoints.is_best(metrics):
                with self.timers("save_checkpoint"):
                    self._save(self._driver_state(), self._carried_over(), metrics)
                metrics |= self.timers.take()
            self.tracker.log(self.global_step, metrics)
            self._skipped_steps.note(self.global_step, metrics)
            self.tracker.folder.log_timeline(self.global_step, self._take_timeline())
            self._last_metrics = metrics
            if self.stop.name is not None:
                self._save_and_stop(self._driver_state(), self._carried_over())
                break
            if self.global_step == freeze_after < self._last_step:
                self.groups.freeze_gc()
                freeze_gc()
        return last_validation

    def _timed_validation(self) -> Metrics:
        with self.timers("testing"):
            metrics = self._validate()
        self.checkpoints.check_validation(metrics)
        return metrics

    def _is_due(self, freq: int | str) -> bool:
        """Every `freq` steps, and at the last one."""
        steps = freq if isinstance(freq, int) else self._intervals[freq]
        return self.global_step == self._last_step or (steps > 0 and self.global_step % steps == 0)

    def _save_and_stop(self, state: dict[str, Any], carried: dict[str, DataProto]) -> None:
        """The run was asked to stop: save a checkpoint of the last finished step, unless there is one."""
        stopped_in = self.stop.phase
        self.stop.keep_step()
        with self.timers("save_checkpoint"):
            self._note_saved(self.checkpoints.finish())
            if self.global_step not in (0, self._saved_step):
                self._save(state, carried, self._last_metrics)
        self.tracker.event("stopped", self.global_step, signal=self.stop.name, phase=stopped_in)

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Record a failure with phase and step, and tell the user which checkpoint the run continues from."""
        try:
            yield
        except Exception as error:
            self._record_failure(error)
            raise

    def _record_failure(self, error: Exception) -> None:
        if error is self._recorded:
            return
        self._recorded = error
        reason = (error.reason if isinstance(error, WorkerError) else str(error))[:1000]
        phase = self.timers.interrupted or self._present_phase
        where = f"step {self.global_step}" if self.global_step else "the start, before the first step"
        where = f"phase {phase!r} of {where}" if phase else where
        who = f"{error.role}[rank {error.rank}], {error.method}: " if isinstance(error, WorkerError) else ""
        if isinstance(error, WorkerError):
            saved = f"step {self._saved_step}" if self._saved_step else "the beginning: it has no checkpoint"
            continues = f" The same command continues the run from {saved}." if self.global_step else ""
            error.add_note(f"In {where}.{continues}")
        with suppress(OSError):  # a full disk, which must not hide the error
            self._write_now(None, failed=f"It failed in {where}: {who}{reason}")
            # An event makes the folder one of a run, which the next attempt would move to `previous_N`.
            if self.global_step:
                self._note_failure(error, phase, reason)

    def _note_failure(self, error: Exception, phase: str | None, reason: str) -> None:
        folder, step = self.tracker.folder, self.global_step
        if isinstance(error, StalledError):
            folder.log_event("stalled", step, phase=phase, reason=reason)
        if isinstance(error, WorkerError):
            facts = {"role": error.role, "rank": error.rank, "method": error.method, "phase": phase}
            folder.log_event("worker_failed", step, **facts, reason=reason)

    def _end_hung(self, error: WorkerError) -> None:
        """A call hangs in this very process. Runs in another thread."""
        self.stop.end_hung(error, self._record_failure)

    def _phase_changed(self, name: str | None) -> None:
        self._present_phase, self._phase_began = name, time.time()
        self._wait_noted_at = self._phase_began
        self._write_now(name)
        if self._on_phase is not None:
            self._on_phase(name)

    def _note_wait(self, words: str) -> None:
        """Who waits for whom, where a phase takes long; called all the time."""
        if words and time.time() - self._wait_noted_at >= _NOTE_WAITS_S:
            self._wait_noted_at = time.time()
            self._write_now(self._present_phase, waits=words)
            self.tracker.show_wait(words)

    def _write_now(self, phase: str | None, *, finished: bool = False, stopped: bool = False, **facts: str) -> None:
        # A run that only validates takes no steps, so it has no total.
        total = None if self.config.trainer.val_only else self.total_steps
        try:
            self.tracker.folder.write_now(
                step=self.global_step,
                total_steps=total,
                phase=phase,
                since=round(self._phase_began, 3),
                finished=finished,
                stopped=stopped,
                **facts,
            )
        except OSError as error:  # it is only shown; an error that a phase ends with must not be lost for it
            logger.warning("what the run is doing now cannot be written: %s", error)

    def _take_timeline(self) -> list[TimelineRow]:
        return take_timeline(self.timers, self.groups.processes, self._engine_spans())

    # ---- checkpoints ----

    def _save(self, state: dict[str, Any], carried: dict[str, DataProto], metrics: Metrics) -> None:
        state, carried = self._checkpoint_parts(state, carried)
        # The step's metrics are logged after its checkpoint; a run killed in between restores them from here.
        state = {**state, "metrics": metrics, "rows_per_step": rows_per_step(self.config)}
        self._note_saved(self.checkpoints.save(self.global_step, self.groups, state, carried=carried))

    def _note_saved(self, steps: list[int]) -> None:
        for step in steps:
            self._saved_step = step
            self.tracker.event("checkpoint", step)

    def _load_checkpoint(self) -> None:
        checkpoint = self.checkpoints.load(self.groups)
        store = CheckpointStore(self.config.trainer.run_dir)
        if checkpoint is None:
            # Left here, they would be taken for this run's until it has saved one. A validation replaces no run.
            self.tracker.start(*([] if self.config.trainer.val_only else store.paths()))
            return
        self.global_step = self._saved_step = checkpoint.step
        self._last_metrics = checkpoint.metrics
        self._weights_loaded()
        logger.info("resumed from %s at step %d", checkpoint.folder, checkpoint.step)
        if self.config.trainer.val_only:
            if checkpoint.folder.parent.resolve() != self.tracker.folder.path.resolve():
                self.tracker.start()
            return  # in the run's own folder no step is repeated, so what was recorded after this one stays
        self._refuse_other_epochs(checkpoint)
        self._load_driver_state(checkpoint.state)
        self.tracker.resume(checkpoint.step, *store.paths(after=checkpoint.step))
        if checkpoint.step >= self.total_steps:
            logger.warning(
                "%s is at step %d of %d: nothing is left to train. To train on, raise the number of steps (steps=). "
                "For a new run, give another folder (output=), or start over here with trainer.resume_mode=disable.",
                self.tracker.folder.path, checkpoint.step, self.total_steps,
            )  # fmt: skip
        if all(row["step"] != checkpoint.step for row in self.tracker.folder.read_metrics()):
            self.tracker.log(checkpoint.step, checkpoint.metrics)

    def _refuse_other_epochs(self, checkpoint: LoadedCheckpoint) -> None:
        """Steps that took another number of rows count otherwise towards `trainer.total_epochs`."""
        epochs, now = self.config.trainer.total_epochs, rows_per_step(self.config)
        before = checkpoint.state.get("rows_per_step", now)  # earlier versions did not save it
        if before == now or self.config.trainer.total_training_steps is not None:
            return
        left = max(0, self.train_loader.sampler.num_rows * epochs - checkpoint.step * before)
        why = (
            f"trainer.total_epochs={epochs} counts steps of {now} rows, and the {checkpoint.step} steps of "
            f"{checkpoint.folder} took {before} each; set trainer.total_training_steps={checkpoint.step + left // now} "
            "to train these epochs to their end, or put data.train_batch_size (data.gen_batch_size) back."
        )
        raise ConfigError([Problem("trainer.total_epochs", why)])


def total_training_steps(config: DovetailConfig, batches_per_epoch: int) -> int:
    """Steps of the run: set, or from the epochs."""
    total = config.trainer.total_training_steps
    if total is None:
        total = steps_of_an_epoch(config, batches_per_epoch) * config.trainer.total_epochs
    return total


def steps_of_an_epoch(config: DovetailConfig, batches: int) -> int:
    """Steps that make an epoch of so many batches of the loader."""
    return max(1, batches // (rows_per_step(config) // config.generation_batch_size))


def rows_per_step(config: DovetailConfig) -> int:
    """Rows of the data that a step takes, as epochs count: whole batches of generation."""
    return math.ceil(config.data.train_batch_size / config.generation_batch_size) * config.generation_batch_size
