"""How long a run is, what it reads, saves, validates and logs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from dovetail.config.checks.examined import Check, Examined
from dovetail.config.errors import Problem

# What `dovetail.observability.tracker` knows; a test holds the two against each other.
LOGGERS = ("console", "file", "wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio", "jsonl")


def _prompts(run: Examined) -> Iterator[Problem]:
    data, trainer = run.config.data, run.config.trainer
    if not data.train_paths and not trainer.val_only:
        yield run.error("@data.train_files is empty, so there is nothing to train on; name a file.")
    if data.val_paths:
        return
    if trainer.val_only:
        yield run.error("<trainer.val_only> and @data.val_files is empty; name the validation file.", "data.val_files")
    elif trainer.test_freq > 0:
        yield run.warning(
            "<trainer.test_freq> validates nothing: @data.val_files is empty; name a validation file, or use "
            "trainer.test_freq=-1."
        )
    for name, unset in (("validation_data_dir", None), ("log_val_generations", 0)):
        if getattr(trainer, name) != unset:
            yield run.warning(
                f"<trainer.{name}> has nothing to show: @data.val_files is empty; name a validation file."
            )


def _saving(run: Examined) -> Iterator[Problem]:
    trainer = run.config.trainer
    steps = trainer.total_training_steps
    for name, meaning in (("test_freq", "validate at the end only"), ("save_freq", "save nothing")):
        if getattr(trainer, name) == 0:
            yield run.warning(f"<trainer.{name}> is no number of steps; it is read as -1: {meaning}.")
    if steps and trainer.save_freq > steps:
        yield run.warning(
            "<trainer.save_freq> is more than <trainer.total_training_steps>: there is no checkpoint before the end; "
            f"use {max(1, steps // 4)}."
        )
    if trainer.max_actor_ckpt_to_keep and trainer.save_freq == -1:
        yield run.warning(
            "<trainer.max_actor_ckpt_to_keep> and <trainer.save_freq>, which writes none; use trainer.save_freq=20 or "
            "so.",
            "trainer.save_freq",
        )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield run.error(
            "<trainer.resume_mode> continues @trainer.resume_from_path, which is not set; give the checkpoint's "
            "folder, or use resume_mode=auto.",
            "trainer.resume_from_path",
        )
    elif trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield run.warning(
            f"<trainer.resume_from_path> has no effect with resume_mode={trainer.resume_mode}; set "
            "trainer.resume_mode=resume_path."
        )


def _learning_rates(run: Examined) -> Iterator[Problem]:
    roles = {"actor": run.config.actor_rollout_ref.actor.optim}
    roles |= {"critic": run.config.critic.optim} if run.config.uses_critic else {}
    steps = run.config.trainer.total_training_steps
    for role, optim in roles.items():
        if optim.lr == 0:
            yield run.warning(f"@{role}.optim.lr=0 changes no weight; use 1e-6 to train.")
        if steps and optim.lr_warmup_steps >= steps:
            yield run.warning(
                f"<{role}.optim.lr_warmup_steps> covers all <trainer.total_training_steps>, so the peak rate is never "
                f"reached; use {max(0, steps // 10)}."
            )


def _trackers_and_dumps(run: Examined) -> Iterator[Problem]:
    trainer = run.config.trainer
    for name in trainer.loggers:
        # A module may register more; those are asked for when it is imported.
        if name not in LOGGERS and not trainer.import_modules:
            close = difflib.get_close_matches(name, LOGGERS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield run.error(f"@trainer.logger={name} is no tracker; {hint}Known: {', '.join(LOGGERS)}.")
    first, second = trainer.rollout_data_dir, trainer.validation_data_dir
    if first is not None and second is not None and Path(first).absolute() == Path(second).absolute():
        yield run.error(
            "<trainer.validation_data_dir> is trainer.rollout_data_dir too, and both hold a file <step>.jsonl; give "
            "each a folder of its own."
        )


SCHEDULE: tuple[Check, ...] = (_prompts, _saving, _learning_rates, _trackers_and_dumps)
