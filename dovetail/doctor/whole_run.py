"""Whole training runs of two steps, started as a user starts them, and one that is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dovetail.checkpoint.store import CheckpointStore
from dovetail.doctor.site import DATA, EXACT, MODEL, REWARD, Site
from dovetail.observability.run_folder import METRICS, RunFolder

STEPS = 2
_LIMIT_S = 240.0


def finished_run(site: Site, folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run of two steps in `folder`: resumed where it has a checkpoint, as it is where it is done."""
    log = folder.with_suffix(".log")
    if len(done := _metrics(folder)) == STEPS:
        return done
    with log.open("a") as out:
        done = subprocess.run(_command(site, folder), stdout=out, stderr=out, timeout=_LIMIT_S)
    rows = RunFolder(folder).read_metrics() if done.returncode == 0 else []
    if done.returncode or [row["step"] for row in rows] != list(range(1, STEPS + 1)):
        raise RuntimeError(
            f"the run ended with exit code {done.returncode} after {len(rows)} of {STEPS} steps:\n{_tail(log)}"
        )
    return rows


def killed_run(site: Site, folder: Path) -> None:
    """The same run, killed with everything it started once its first checkpoint is complete."""
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        run = subprocess.Popen(_command(site, folder), stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + _LIMIT_S
    try:
        while not CheckpointStore(folder).steps():
            if run.poll() is not None:
                raise RuntimeError(
                    f"the run ended (exit code {run.returncode}) before it could be killed:\n{_tail(log)}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"no checkpoint in {folder} within {_LIMIT_S:.0f} s:\n{_tail(log)}")
            time.sleep(0.02)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    if CheckpointStore(folder).steps() != [1]:
        raise RuntimeError(f"the run was over before the kill: checkpoints {CheckpointStore(folder).steps()}.")


def _command(site: Site, folder: Path) -> list[str]:
    rows = max(4, site.num_devices)
    keys = [
        *EXACT,
        f"data.train_files={site.folder / DATA}",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        f"data.train_batch_size={rows}",
        f"actor_rollout_ref.model.path={site.folder / MODEL}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={rows}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={site.folder / REWARD}",
        f"trainer.nnodes={site.num_nodes}",
        f"trainer.n_gpus_per_node={site.devices_per_node}",
        f"trainer.device={site.device}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder}",
    ]
    return [sys.executable, "-m", "dovetail.cli.main", "train", *keys, *site.overrides]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).read_metrics() if (folder / METRICS).exists() else []


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])
