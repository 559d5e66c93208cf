"""Check that the run folder is the same folder on every node, before the first checkpoint is written into it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.controller import RayWorkerGroup, WorkerGroup

_VISIBLE_S = 30.0
"""A network file system may show a new file late."""


def with_absolute_folders(config: DovetailConfig) -> DovetailConfig:
    """Folders as absolute paths, resolved by the driver: a worker's current directory may differ."""
    settings = config.trainer
    changes = {"default_local_dir": _absolute(settings.run_dir)}
    if settings.resume_from_path is not None:
        changes["resume_from_path"] = _absolute(settings.resume_from_path)
    updated: dict[str, Any] = {"trainer": settings.model_copy(update=changes)}
    for role in ("actor_rollout_ref", "critic", "reward_model"):
        section = getattr(config, role)
        if folders := _existing_folders(section.model):
            updated[role] = section.model_copy(update={"model": section.model.model_copy(update=folders)})
    distill = config.distill
    one = distill.teacher.model_copy(update=_existing_folders(distill.teacher))
    several = {
        name: _existing_folders(one.model_copy(update={"path": path})).get("path", path)
        for name, path in distill.teachers.items()
    }
    updated["distill"] = distill.model_copy(update={"teacher": one, "teachers": several})
    return config.model_copy(update=updated)


def _existing_folders(model: Any) -> dict[str, str]:
    """Relative paths of a model that are folders of this machine; everything else may be a name on the hub."""
    paths = {name: getattr(model, name, None) for name in ("path", "tokenizer_path", "lora_adapter_path")}
    return {
        name: _absolute(path)
        for name, path in paths.items()
        if path and not Path(path).is_absolute() and Path(path).exists()
    }


def check_shared_folder(workers: WorkerGroup, folder: Path) -> None:
    """Write a file and have the workers of every node read it; ConfigError if a node has a different folder there."""
    if not isinstance(workers, RayWorkerGroup):
        return
    nodes = [identity.node for identity in workers.identities]
    marker = folder / f".shared-{secrets.token_hex(4)}"
    marker.write_text(marker.name)
    try:
        problems = workers.execute_all_sync("execute_func", _problem_with, str(marker))
    finally:
        marker.unlink(missing_ok=True)
    blind = {node: problem for node, problem in zip(nodes, problems, strict=True) if problem}
    if blind:
        names = "; ".join(f"node {node}: {problem}" for node, problem in blind.items())
        raise ConfigError(
            [
                Problem(
                    "trainer.default_local_dir",
                    f"trainer.default_local_dir={folder} is not the driver's folder on every node ({names}). Workers "
                    "write their part of a checkpoint there: give a folder on a file system that all nodes share.",
                )
            ]
        )


def _problem_with(marker: str) -> str:
    """In a worker: why it does not see the driver's file; empty when it does."""
    file, end = Path(marker), time.monotonic() + _VISIBLE_S
    while not file.exists():
        if not file.parent.exists() or time.monotonic() > end:
            return f"it has no {file.parent}" if not file.parent.exists() else f"its {file.parent} is another folder"
        time.sleep(0.2)
    return "" if file.read_text() == file.name else f"it reads something else in {file}"


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())
