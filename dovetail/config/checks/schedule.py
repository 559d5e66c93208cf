"""How long a run is, what it reads, saves, validates and logs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from dovetail.config.checks.checked import ACTOR, Checked, error, warning
from dovetail.config.errors import Problem

# What `dovetail.observability.tracker` knows; a test holds the two against each other.
LOGGERS = (
    "console",
    "file",
    "wandb",
    "tensorboard",
    "mlflow",
    "swanlab",
    "clearml",
    "trackio",
    "jsonl",
)


def there_are_prompts(run: Checked) -> Iterator[Problem]:
    data, trainer = run.config.data, run.config.trainer
    if not data.train_paths and not trainer.val_only:
        yield error("data.train_files", "data.train_files is empty, so there is nothing to train on; name a file.")
    if trainer.val_only and not data.val_paths:
        yield error("data.val_files", "trainer.val_only=True and data.val_files is empty; name the validation file.")


def validation_has_prompts(run: Checked) -> Iterator[Problem]:
    trainer = run.config.trainer
    if trainer.test_freq > 0 and not run.config.data.val_paths and not trainer.val_only:
        yield warning(
            "trainer.test_freq",
            f"trainer.test_freq={trainer.test_freq} validates nothing: data.val_files is empty; "
            "name a validation file, or use trainer.test_freq=-1.",
        )


def frequencies_are_not_zero(run: Checked) -> Iterator[Problem]:
    for name, meaning in (("test_freq", "validate at the end only"), ("save_freq", "save nothing")):
        if getattr(run.config.trainer, name) == 0:
            yield warning(f"trainer.{name}", f"trainer.{name}=0 is no number of steps; it is read as -1: {meaning}.")


def checkpoints_fall_inside_the_run(run: Checked) -> Iterator[Problem]:
    trainer = run.config.trainer
    steps = trainer.total_training_steps
    if steps and trainer.save_freq > steps:
        yield warning(
            "trainer.save_freq",
            f"trainer.save_freq={trainer.save_freq} is more than trainer.total_training_steps={steps}: "
            f"there is no checkpoint before the end; use {max(1, steps // 4)}.",
        )
    keep = trainer.max_actor_ckpt_to_keep
    if keep and trainer.save_freq == -1:
        yield warning(
            "trainer.save_freq",
            f"trainer.max_actor_ckpt_to_keep={keep} and trainer.save_freq=-1, which writes none; "
            "use trainer.save_freq=20 or so.",
        )


def resumed_checkpoint_is_named(run: Checked) -> Iterator[Problem]:
    trainer = run.config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield error(
            "trainer.resume_from_path",
            "trainer.resume_mode=resume_path continues trainer.resume_from_path, which is not set; "
            "give the checkpoint's folder, or use resume_mode=auto.",
        )
    elif trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield warning(
            "trainer.resume_from_path",
            f"trainer.resume_from_path={trainer.resume_from_path} has no effect with "
            f"resume_mode={trainer.resume_mode}; "
            "set trainer.resume_mode=resume_path.",
        )


def learning_rates_do_something(run: Checked) -> Iterator[Problem]:
    roles = {ACTOR: run.config.actor_rollout_ref.actor.optim}
    if run.config.uses_critic:
        roles["critic"] = run.config.critic.optim
    steps = run.config.trainer.total_training_steps
    for prefix, optim in roles.items():
        if optim.lr == 0:
            yield warning(f"{prefix}.optim.lr", f"{prefix}.optim.lr=0 changes no weight; use 1e-6 to train.")
        if steps and optim.lr_warmup_steps >= steps:
            yield warning(
                f"{prefix}.optim.lr_warmup_steps",
                f"{prefix}.optim.lr_warmup_steps={optim.lr_warmup_steps} covers all "
                f"trainer.total_training_steps={steps}, "
                f"so the peak rate is never reached; use {max(0, steps // 10)}.",
            )


def trackers_are_known(run: Checked) -> Iterator[Problem]:
    for name in run.config.trainer.loggers:
        if name in LOGGERS:
            continue
        close = difflib.get_close_matches(name, LOGGERS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        yield error("trainer.logger", f"trainer.logger={name} is no tracker; {hint}Known: {', '.join(LOGGERS)}.")


def dumps_have_folders_of_their_own(run: Checked) -> Iterator[Problem]:
    trainer = run.config.trainer
    first, second = trainer.rollout_data_dir, trainer.validation_data_dir
    if first is not None and second is not None and Path(first).absolute() == Path(second).absolute():
        yield error(
            "trainer.validation_data_dir",
            f"trainer.validation_data_dir={second} is trainer.rollout_data_dir too, and both hold a file <step>.jsonl; "
            "give each a folder of its own.",
        )


def validation_answers_have_prompts(run: Checked) -> Iterator[Problem]:
    trainer = run.config.trainer
    for name, empty in (("validation_data_dir", None), ("log_val_generations", 0)):
        value = getattr(trainer, name)
        if value != empty and not run.config.data.val_paths:
            yield warning(
                f"trainer.{name}",
                f"trainer.{name}={value} has nothing to show: data.val_files is empty; name a validation file.",
            )
