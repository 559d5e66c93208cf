"""From a resolved configuration to a finished run: check, plan, start, train, clean up."""

from __future__ import annotations

import inspect
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.config import ConfigError
from dovetail.config.checks import check_config, refuse_errors
from dovetail.config.effects import unsupported_in_runs
from dovetail.config.errors import Problem
from dovetail.config.plan import make_plan, read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import import_user_modules, load_user_object, split_address
from dovetail.controller import WorkerError, WorkerHungError, stop_ray
from dovetail.observability.console import StepConsole, make_console
from dovetail.observability.run_folder import RunFolder
from dovetail.observability.run_lock import RunLock
from dovetail.observability.stalls import STALLED_EXIT_CODE, StalledError
from dovetail.observability.timers import PhaseTimers
from dovetail.observability.tracker import Tracker
from dovetail.trainer.choose import gpu_gib
from dovetail.trainer.devices import (
    joins_cluster,
    ray_runs_here,
    refuse_missing_devices,
    start_cluster,
    uses_gpu,
    warn_of_slow_bfloat16,
)
from dovetail.trainer.groups import TrainedGroups
from dovetail.trainer.inputs import missing_inputs
from dovetail.trainer.method import Method, RunOptions
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.preflight import read_inputs
from dovetail.trainer.recording import Recording
from dovetail.trainer.refusals import USER_ERRORS
from dovetail.trainer.shared_folder import check_shared_folder, with_absolute_folders
from dovetail.trainer.stopping import StopRequest, resume_line

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, float]], str | bool | None]
"""`(step, metrics)`; the run ends after this step, with a checkpoint, when it returns "stop" or True."""


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run."""

    folder: Path
    steps: int
    validation: dict[str, float]
    stopped_by: int | None = None
    """The signal that asked the run to end before its last step."""


def run_training(
    config: DovetailConfig,
    *,
    trainer_class: type[RayPPOTrainer] | None = None,
    use_ray: bool = True,
    console: Callable[[str, int], StepConsole] = make_console,
    recording: Recording | None = None,
    on_step: OnStep | None = None,
    on_checked: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train as the configuration says. `use_ray=False` runs everything in this process, for a debugger.

    With a `recording` nothing is generated: its batches are trained on. `on_step` is called after every step, as the
    function of `trainer.on_step` is, and `on_checked` once nothing is wrong with keys and names of files.

    Errors in keys, files, columns and reward functions are raised before a process is started.
    """
    timers = PhaseTimers()
    config = with_absolute_folders(config)
    import_user_modules(config.trainer.import_modules)
    shapes = read_shapes(config)
    findings = [*check_config(config, shapes.policy), *unsupported_in_runs(config), *missing_inputs(config)]
    refuse_errors(findings)
    if use_ray and not joins_cluster(config):
        refuse_missing_devices(config, generates=recording is None)
    on_checked()
    for finding in findings:
        logger.warning("%s", finding)
    lock = RunLock(config.trainer.run_dir)
    lock.refuse_if_held()
    settings = config.trainer
    watchers = [watcher for watcher in (on_step, _named_watcher(settings.on_step)) if watcher is not None]
    for watcher in watchers:
        _refuse_other_arguments(watcher)
    with ExitStack() as open_things:
        options = RunOptions(use_ray=use_ray, trainer_class=trainer_class, recording=recording)
        with timers("read_inputs"):
            method = read_inputs(config, options, open_things)
            for notice in method.notices():
                logger.warning("%s", notice.message)
        folder = RunFolder(settings.run_dir)
        for name in ("rollout_data_dir", "validation_data_dir"):
            if (path := getattr(settings, name)) is not None:
                Path(path).mkdir(parents=True, exist_ok=True)
        folder.path.mkdir(parents=True, exist_ok=True)
        open_things.enter_context(lock)
        folder.write_config(config.model_dump(mode="json"))
        folder.write_plan(make_plan(config, shapes, device_memory_gib=gpu_gib(config)).to_dict())
        with _start_recorded(folder, method.total_steps):
            view = console(f"{settings.project_name}/{settings.experiment_name}", method.total_steps)
            stop = StopRequest()
            tracker = open_things.enter_context(
                Tracker(
                    settings.loggers,
                    folder,
                    project=settings.project_name,
                    experiment=settings.experiment_name,
                    config=config.model_dump(mode="json"),
                    console=view,
                    on_step=_watched(watchers, stop) if watchers else None,
                )
            )
            if use_ray and not ray_runs_here():  # one that its process had started before is not the run's
                open_things.callback(stop_ray)
            with timers("start_cluster"):
                use_gpu = start_cluster(config, generates=recording is None) if use_ray else uses_gpu(config)
            if not use_gpu:
                warn_of_slow_bfloat16(config)
            method.cluster_started(use_gpu=use_gpu)
            open_things.enter_context(stop.listening())  # after Ray's start, which sets a handler of its own
            trainer = method.create_trainer(
                tracker,
                create_groups=lambda: _create_groups(method, folder.path, use_gpu=use_gpu),
                on_phase=view.phase,
                stop=stop,
            )
        trainer.timers.extend(timers)
        try:
            trainer.init_workers()
            validation = trainer.fit()
        except WorkerError as error:
            # An error that the user can fix needs neither the worker's name nor its traceback.
            if isinstance(error.exception, (*USER_ERRORS, StalledError)):
                raise error.exception from error
            raise
        finally:
            if trainer.has_workers:
                trainer.groups.shutdown()
    return RunResult(folder.path, trainer.global_step, validation, stop.signum)


@contextmanager
def _start_recorded(folder: RunFolder, total_steps: int) -> Iterator[None]:
    """The run folder says that the run starts, and why that failed; what comes later the trainer says."""
    now = {"step": 0, "total_steps": total_steps}
    folder.write_now(**now, phase="start")
    try:
        yield
    except Exception as error:
        with suppress(OSError):  # a full disk
            folder.write_now(**now, phase=None, failed=f"It failed before it started processes: {str(error)[:1000]}")
        raise


def exit_code_of(train: Callable[[], RunResult], config: DovetailConfig) -> int:
    """Run it for a command: what went wrong goes to standard error; returns the exit code."""
    try:
        result = train()
    except USER_ERRORS as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except StalledError as error:
        sys.stderr.write(f"{error}\n")
        return STALLED_EXIT_CODE
    except WorkerError as error:
        # The worker's own traceback is in the message; the driver's says nothing more.
        sys.stderr.write("\n".join([str(error), *getattr(error, "__notes__", ())]) + "\n")
        return STALLED_EXIT_CODE if isinstance(error, WorkerHungError) else 1
    except KeyboardInterrupt as error:
        sys.stderr.write(
            f"interrupted; the run is in {config.trainer.run_dir}. "
            "The same command goes on from its newest checkpoint, if it has one.\n"
        )
        return 128 + getattr(error, "signum", signal.SIGINT)
    if result.stopped_by is not None:
        sys.stderr.write(stopped_message(result, config))
        return 128 + result.stopped_by
    sys.stdout.write(f"{result.steps} step{'s' * (result.steps != 1)} done; the run is in {result.folder}\n")
    return 0


def stopped_message(result: RunResult, config: DovetailConfig) -> str:
    """For a run that was stopped by a signal: its last checkpoint, and the command that continues it."""
    name = signal.Signals(result.stopped_by or 0).name
    has = f"its checkpoint is {result.folder}/global_step_{result.steps}" if result.steps else "nothing was trained yet"
    line = resume_line(resume_mode=config.trainer.resume_mode)
    return f"{name}: stopped after step {result.steps}; {has}. Go on with:\n  {line}\n"


def _named_watcher(address: str | None) -> OnStep | None:
    return None if address is None else load_user_object(*split_address(address), key="trainer.on_step")


def _refuse_other_arguments(watcher: OnStep) -> None:
    """Here, and not after the first step."""
    try:
        inspect.signature(watcher).bind(1, {})
    except TypeError as error:
        problem = f"on_step: {getattr(watcher, '__name__', watcher)} cannot be called with (step, metrics): {error}."
        raise ConfigError([Problem("trainer.on_step", problem)]) from error
    except ValueError:  # a function of C says nothing of its arguments
        return


def _watched(watchers: Sequence[OnStep], stop: StopRequest) -> Callable[[int, dict[str, float]], None]:
    ignored: set[type] = set()

    def call(step: int, metrics: dict[str, float]) -> None:
        for answer in [watcher(step, metrics) for watcher in watchers]:
            says = bool(answer) if isinstance(answer, bool | np.bool_ | None) else answer
            if says is True or (isinstance(says, str) and says == "stop"):
                stop.asked_by = "on_step"
            elif says is not False and type(says) not in ignored:
                ignored.add(type(says))
                logger.warning('on_step returned %.60r, which has no effect: "stop" or True ends the run.', says)

    return call


def _create_groups(method: Method, folder: Path, *, use_gpu: bool) -> TrainedGroups:
    groups = method.create_groups(use_gpu=use_gpu)
    try:
        check_shared_folder(groups.learner, folder)
    except BaseException:
        groups.shutdown()
        raise
    return groups
