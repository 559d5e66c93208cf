"""Replay of a recorded run: the same trainer on the recorded batches, and a comparison of what comes out of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest import read_manifest
from dovetail.checkpoint.store import CheckpointStore
from dovetail.config.load import load_config
from dovetail.config.root import DovetailConfig
from dovetail.config.yaml_text import load_yaml
from dovetail.observability.run_folder import CONFIG, RunFolder
from dovetail.trainer.recording import RecordError, Recording
from dovetail.trainer.run import run_training

NOT_REPEATABLE = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")
"""Metrics that two equal runs need not share: clocks and memory."""
_SHARD = ".distcp"


@dataclass(frozen=True)
class Replay:
    """What was compared, and a sentence for each difference."""

    folder: Path
    num_steps: int
    num_metrics: int
    checkpoints: list[str]
    differences: list[str]


def replay_run(folder: Path, out: Path, *, use_ray: bool) -> Replay:
    """Train on the record of `folder` into `out`, without engines and validation, and compare the two."""
    config = _config(folder, out)
    began_from = config.trainer.resume_from_path if config.trainer.resume_mode == "resume_path" else None
    recording = Recording(folder, first_step=1 + read_manifest(Path(began_from)).step if began_from else 1)
    if (out / CONFIG).exists():
        raise RecordError(f"{out} already holds a run; remove it, or give another folder with --out.")
    run_training(config, use_ray=use_ray, recording=recording)
    return compare(folder, out)


def compare(folder: Path, replayed: Path) -> Replay:
    """Metrics that both have, and the shards of checkpoints that both have (weights and optimizer), must be equal."""
    expected = {row["step"]: row for row in RunFolder(folder).read_metrics()}
    rows = RunFolder(replayed).read_metrics()
    differences, num_metrics = [], 0
    for row in rows:
        other = expected[row["step"]]
        names = [name for name in row.keys() & other.keys() if not name.startswith(NOT_REPEATABLE)]
        num_metrics += len(names)
        differences += [
            f"step {row['step']}: {name} is {row[name]}, and was {other[name]}."
            for name in sorted(names)
            if row[name] != other[name]
        ]
    steps = sorted({*CheckpointStore(folder).steps()} & {*CheckpointStore(replayed).steps()})
    names = [CheckpointStore(folder).folder(step).name for step in steps]
    for name in names:
        if (found := _shards(replayed / name)) != (before := _shards(folder / name)):
            changed = sorted(shard for shard in before.keys() | found.keys() if before.get(shard) != found.get(shard))
            differences.append(f"{name}: {', '.join(changed)} differ.")
    return Replay(replayed, len(rows), num_metrics, names, differences)


def _config(folder: Path, out: Path) -> DovetailConfig:
    """The run's own, without what only its generation needed."""
    try:
        tree: dict[str, Any] = load_yaml((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(
            f"{folder} is no run folder: its {CONFIG} cannot be read ({error.strerror}); give the folder "
            "of a run with async_training.record=True."
        ) from error
    if not isinstance(tree, dict) or {"data", "async_training", "trainer"} - tree.keys():
        raise RecordError(f"{folder / CONFIG} is not the configuration of a run; give the folder of one.")
    changes: dict[str, Any] = {"data.val_files": [], "async_training.record": False}
    trainer = {"default_local_dir": str(out), "val_before_train": False, "test_freq": -1, "logger": ["file"]}
    trainer |= {"rollout_data_dir": None, "validation_data_dir": None}
    if tree["trainer"]["resume_mode"] != "resume_path":
        trainer["resume_mode"] = "disable"
    # An earlier version may have written the file.
    return load_config([folder / CONFIG], values={**changes, "trainer": trainer}).config


def _shards(folder: Path) -> dict[str, str]:
    return {name: file.sha256 for name, file in read_manifest(folder).files.items() if name.endswith(_SHARD)}
