"""How long a run is, what it reads, saves, validates and logs."""

from __future__ import annotations

from pathlib import Path

from dovetail.config.checks.examined import Check, Examined, Findings


def _prompts(run: Examined) -> Findings:
    data, trainer = run.data, run.trainer
    if not data.train_paths and not trainer.val_only:
        yield run.error("@data.train_files is empty, so there is nothing to train on; name a file (data=FILE).")
    if not data.val_paths and trainer.val_only:
        yield run.error("@data.val_files is empty: nothing to evaluate; name a file (`dovetail eval --data FILE`).")


def _saving(run: Examined) -> Findings:
    trainer, steps = run.trainer, run.trainer.total_training_steps
    if steps and isinstance(trainer.save_freq, int) and trainer.save_freq > steps:
        fix = f"use {max(1, steps // 4)}"
        yield run.warning(f"<trainer.save_freq> exceeds all {steps} steps: no checkpoint before the end; {fix}.")
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield run.error("@trainer.resume_from_path is not set and <trainer.resume_mode>; give the checkpoint's folder.")
    first, second = trainer.rollout_data_dir, trainer.validation_data_dir
    if first is not None and second is not None and Path(first).absolute() == Path(second).absolute():
        what = "is rollout_data_dir too, and both hold <step>.jsonl"
        yield run.error(f"<trainer.validation_data_dir> {what}; give each a folder of its own.")


def _learning_rates(run: Examined) -> Findings:
    roles = {"actor": run.actor.optim}
    roles |= {"critic": run.config.critic.optim} if run.config.uses_critic else {}
    steps = run.trainer.total_training_steps
    for role, optim in roles.items():
        if optim.lr == 0:
            yield run.warning(f"@{role}.optim.lr=0 changes no weight; use 1e-6 to train.")
        if steps and optim.lr_warmup_steps >= steps:
            key, fix = f"{role}.optim.lr_warmup_steps", f"use {max(0, steps // 10)}"
            yield run.warning(f"<{key}> covers all {steps} steps, so the peak rate is never reached; {fix}.")


SCHEDULE: tuple[Check, ...] = (_prompts, _saving, _learning_rates)
