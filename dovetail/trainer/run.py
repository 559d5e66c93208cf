"""From a resolved configuration to a finished run: check, plan, start, train, clean up."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.config import ConfigError
from dovetail.config.checks import check_config, refuse_errors
from dovetail.config.effects import refuse_unsupported
from dovetail.config.errors import Problem
from dovetail.config.plan import make_plan, read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import UserCodeError, import_user_modules
from dovetail.controller import WorkerError, stop_ray
from dovetail.data.build import build_train_loader, build_val_loader
from dovetail.data.errors import DataError
from dovetail.data.prompts import PromptDataset
from dovetail.models.errors import ModelError
from dovetail.models.folder import check_model_folder
from dovetail.models.load import Role, load_config, load_processor, load_tokenizer, model_folder
from dovetail.observability.console import StepConsole, make_console
from dovetail.observability.disk import DiskFullError
from dovetail.observability.run_folder import RunFolder
from dovetail.observability.run_lock import RunFolderInUse, RunLock
from dovetail.observability.sinks import MissingTrackerError
from dovetail.observability.tracker import Tracker
from dovetail.rewards.build import build_reward_runner, other_scoring_nodes
from dovetail.rewards.errors import RewardError
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.devices import joins_cluster, start_cluster, uses_gpu, warn_of_slow_bfloat16
from dovetail.trainer.groups import RoleGroups, create_groups
from dovetail.trainer.inputs import missing_inputs
from dovetail.trainer.ppo import RayPPOTrainer, total_training_steps
from dovetail.trainer.recording import Recording
from dovetail.trainer.registered import refuse_unmet_names
from dovetail.trainer.shared_folder import check_shared_folder, with_absolute_folders
from dovetail.trainer.stalled import TrainingStalled
from dovetail.trainer.stopping import StopRequest, resume_line

logger = logging.getLogger(__name__)

USER_ERRORS = (
    ConfigError,
    DataError,
    ModelError,
    RunFolderInUse,
    TrainingStalled,
    RewardError,
    UserCodeError,
    FileNotFoundError,
    DiskFullError,
    BrokenCheckpoint,
    MissingTrackerError,
)
"""Errors that a user can fix: commands print only the message and exit with 2. All others keep their traceback."""


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
) -> RunResult:
    """Train as the configuration says. `use_ray=False` runs everything in this process, for a debugger.

    With a `recording` nothing is generated: its batches are trained on.

    Errors in keys, files, columns and reward functions are raised before a process is started.
    """
    config = with_absolute_folders(config)
    import_user_modules(config.trainer.import_modules)
    shapes = read_shapes(config)
    refuse_errors(check_config(config, shapes.policy))
    refuse_unsupported(config)
    refuse_errors(missing_inputs(config))
    lock = RunLock(config.trainer.run_dir)
    lock.refuse_if_held()
    _refuse_unknown_fields(config)
    fetch_models(config)
    _refuse_broken_models(config)
    # The devices of a cluster are known once it is joined.
    known_gpu = None if use_ray and joins_cluster(config) else uses_gpu(config)
    tokenizer, processor = load_readers(config)
    val_loader = build_val_loader(config, tokenizer, processor)
    # A run that only validates may name no training prompts, and draws none.
    train_loader = build_train_loader(config, tokenizer, processor) if config.data.train_paths else val_loader
    assert train_loader is not None, "the checks ask for one of the two"
    for loader in (train_loader, val_loader):
        if loader is not None and known_gpu is not None:
            _refuse_unread_images(config, loader.dataset, on_cuda=known_gpu)
    refuse_unmet_names(config, train_loader.dataset[0])
    settings = config.trainer
    trainer_class = trainer_class or (RayDAPOTrainer if config.algorithm.filter_groups.enable else RayPPOTrainer)
    with ExitStack() as open_things:
        rewards = open_things.enter_context(build_reward_runner(config, tokenizer))
        for loader in (train_loader, val_loader):
            # An agent's environment may score; a source without a rule is then met, and named, when a row needs it.
            agents = config.actor_rollout_ref.rollout.uses_agents
            if loader is not None and isinstance(loader.dataset, PromptDataset) and not agents:
                rewards.check_data_sources(loader.dataset.data_sources())
        folder = RunFolder(settings.run_dir)
        for name in ("rollout_data_dir", "validation_data_dir"):
            if (path := getattr(settings, name)) is not None:
                _make_folder(Path(path), f"trainer.{name}", "folder for answers")
        _make_folder(folder.path, "trainer.default_local_dir", "run folder")
        open_things.enter_context(lock)
        folder.write_config(config.model_dump(mode="json"))
        folder.write_plan(make_plan(config, shapes).to_dict())
        view = console(
            f"{settings.project_name}/{settings.experiment_name}", total_training_steps(config, len(train_loader))
        )
        tracker = open_things.enter_context(
            Tracker(
                settings.loggers,
                folder,
                project=settings.project_name,
                experiment=settings.experiment_name,
                config=config.model_dump(mode="json"),
                console=view,
            )
        )
        if use_ray:
            open_things.callback(stop_ray)
        use_gpu = start_cluster(config) if use_ray else uses_gpu(config)
        if not use_gpu:
            warn_of_slow_bfloat16(config)
        if use_ray:
            rewards.use_nodes(other_scoring_nodes(config))
        for loader in (train_loader, val_loader):
            if loader is not None and known_gpu is None:
                _refuse_unread_images(config, loader.dataset, on_cuda=use_gpu)
        stop = StopRequest()
        open_things.enter_context(stop.listening())  # after Ray's start, which sets a handler of its own
        trainer = trainer_class(
            config,
            tokenizer=tokenizer,
            train_loader=train_loader,
            val_loader=val_loader,
            rewards=rewards,
            tracker=tracker,
            create_groups=lambda: _create_groups(
                config, folder.path, use_ray=use_ray, use_gpu=use_gpu, generates=recording is None
            ),
            on_phase=view.phase,
            stop=stop,
            recording=recording,
        )
        try:
            trainer.init_workers()
            validation = trainer.fit()
        except WorkerError as error:
            # An error that the user can fix needs neither the worker's name nor its traceback.
            if isinstance(error.exception, USER_ERRORS):
                raise error.exception from error
            raise
        finally:
            if trainer.has_workers:
                trainer.groups.shutdown()
    return RunResult(folder.path, trainer.global_step, validation, stop.signum)


def stopped_message(result: RunResult, config: DovetailConfig) -> str:
    """For a run that was stopped by a signal: its last checkpoint, and the command that continues it."""
    name = signal.Signals(result.stopped_by or 0).name
    has = f"its checkpoint is {result.folder}/global_step_{result.steps}" if result.steps else "nothing was trained yet"
    line = resume_line(resume_mode=config.trainer.resume_mode)
    return f"{name}: stopped after step {result.steps}; {has}. Go on with:\n  {line}\n"


def _create_groups(
    config: DovetailConfig, folder: Path, *, use_ray: bool, use_gpu: bool, generates: bool
) -> RoleGroups:
    groups = create_groups(config, use_ray=use_ray, use_gpu=use_gpu, generates=generates)
    try:
        check_shared_folder(groups.actor_rollout, folder)
    except BaseException:
        groups.shutdown()
        raise
    return groups


def _make_folder(path: Path, key: str, what: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{key}={path}: the {what} cannot be made ({error.strerror}); give a folder that you may write to."
        raise ConfigError([Problem(key, why)]) from error


def _refuse_unknown_fields(config: DovetailConfig) -> None:
    """Fail here, instead of in every worker that builds a network with such a field."""
    sections = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    if config.uses_critic:
        sections["critic.model"] = config.critic.model
    for name, model in sections.items():
        # Only workers import the module that may register the architecture.
        if not model.override_config or model.external_lib is not None:
            continue
        try:
            load_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
        except ValueError as error:
            raise ConfigError([Problem(name, f"{name}.{error}")]) from error


def fetch_models(config: DovetailConfig) -> None:
    """Download models named on the hub into its cache, so that a missing one fails before a process starts.

    Workers on other machines fetch for themselves, into the cache of their machine.
    """
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.uses_critic:
        paths["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable and config.reward_model.model.path:
        paths["reward_model.model.path"] = config.reward_model.model.path
    for key, path in paths.items():
        try:
            model_folder(path)
        except FileNotFoundError as error:
            raise ConfigError([Problem(key, f"{key}={path}: {error}")]) from error


def _refuse_broken_models(config: DovetailConfig) -> None:
    """Fail here, in one line, instead of in every worker that reads the folder."""
    policy, reward = config.actor_rollout_ref.model, config.reward_model
    folders: dict[tuple[str, Role], bool] = {(policy.path, "policy"): policy.trust_remote_code}
    if config.uses_critic:
        folders[config.critic.model.path, "value"] = config.critic.model.trust_remote_code
    if reward.enable and reward.model.path:
        folders[reward.model.path, "reward"] = reward.model.trust_remote_code
    # Only workers import the module that may register the architecture.
    if policy.external_lib is None:
        for (path, role), trust_remote_code in folders.items():
            check_model_folder(model_folder(path), role, trust_remote_code=trust_remote_code)


def load_readers(config: DovetailConfig) -> tuple[Any, Any | None]:
    """The tokenizer, and the processor of a model that sees images, with the chat template that prompts are put in."""
    model = config.actor_rollout_ref.model
    trust = model.trust_remote_code
    tokenizer = load_tokenizer(config.data.tokenizer or model.tokenizer_source, trust_remote_code=trust)
    processor = load_processor(model.path, trust_remote_code=trust)
    if model.custom_chat_template is not None:
        for reader in (tokenizer, processor):
            if reader is not None:
                reader.chat_template = model.custom_chat_template
    return tokenizer, processor


def _refuse_unread_images(config: DovetailConfig, dataset: Any, *, on_cuda: bool) -> None:
    """Fail here, instead of at the first request that a text-only engine refuses."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.reads_images(on_cuda=on_cuda) or not isinstance(dataset, PromptDataset) or not dataset.has_media():
        return
    where = "on CUDA" if rollout.name == "native" else "by URL" if rollout.server_urls else "here"
    raise DataError(
        f"there are prompts with images or videos, and rollout.name={rollout.name} reads token ids only {where}. Use "
        "rollout.name=vllm without server_urls (or native on CPU), or leave the image and video columns out."
    )
