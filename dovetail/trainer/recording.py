"""The batch of a step (`Rollout`) and the record of all of a run's: what training depends on beside seed and config.

An asynchronous run trains on what had finished in time, so it cannot be repeated by its seed. `async_training.record`
keeps each step's batch in `record/step_N.safetensors`: draws in their order, tokens, log-probs, versions, scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.observability.disk import explaining_full_disk
from dovetail.observability.ledger import read_ledger
from dovetail.observability.run_folder import RECORD, RunFolder
from dovetail.protocol import DataProto
from dovetail.protocol.plain_file import PlainFileError, load_plain, save_plain
from dovetail.rewards.runner import PendingRewards, RewardResult

Metrics = dict[str, float]


@dataclass
class Rollout:
    """A batch whose responses are being scored. `order[i]` is the number in which row i was sampled."""

    batch: DataProto
    order: list[int]
    rewards: PendingRewards | RewardResult
    metrics: Metrics


class RecordError(ValueError):
    """A record that cannot be replayed. The message names the file or the step, and the reason."""


def write_record(folder: Path, step: int, rollout: Rollout, rewards: RewardResult) -> None:
    """The file appears when it is complete."""
    facts = {"step": step, "order": rollout.order, "metrics": rollout.metrics, "reward_metrics": rewards.metrics}
    file = _file(folder, step)
    with explaining_full_disk(file):
        save_plain({**facts, "batch": _state(rollout.batch), "rewards": _state(rewards.columns)}, file)


class Recording:
    """The record of a run. Checked when it is opened: every step that has metrics is there.

    `first_step` is the one that the replay begins with: 1, or the one after the checkpoint that the run began from.
    """

    def __init__(self, folder: Path, *, first_step: int = 1) -> None:
        self._folder = folder
        steps = [row["step"] for row in RunFolder(folder).read_metrics()]
        if not _file(folder, first_step).parent.is_dir():
            raise RecordError(f"{folder} has no record of its batches; train with async_training.record=True.")
        if max(steps, default=0) < first_step:
            raise RecordError(f"{folder} has no finished step, so there is nothing to replay.")
        self.last_step = max(steps)
        missing = [step for step in range(first_step, self.last_step + 1) if not _file(folder, step).exists()]
        if missing:
            raise RecordError(
                f"the record of {folder} is incomplete: {_file(folder, missing[0])} is missing"
                + (f", and {len(missing) - 1} more of {self.last_step} steps" if missing[1:] else "")
                + "; a run must be recorded from its first step."
            )
        ledger = read_ledger(folder)
        self._trained: dict[int, set[str]] = {}
        for draw, record in ledger.draws.items() if ledger is not None else ():
            for step in record.trained:
                self._trained.setdefault(step, set()).add(f"draw-{draw}")

    def read(self, step: int) -> Rollout:
        """The batch of a step, scored."""
        file = _file(self._folder, step)
        try:
            facts: dict[str, Any] = load_plain(file)
            batch, scores = DataProto.from_dict(*facts["batch"]), DataProto.from_dict(*facts["rewards"])
            rollout = Rollout(
                batch, facts["order"], RewardResult(scores, facts["reward_metrics"], {}), facts["metrics"]
            )
            recorded = facts["step"]
        except (OSError, PlainFileError, KeyError, TypeError) as error:
            raise RecordError(f"{file} cannot be read ({error}).") from error
        if recorded != step:
            raise RecordError(f"{file} is the record of step {recorded}, not of step {step}.")
        draws = {str(uid) for uid in batch.non_tensor_batch["uid"]}
        if draws != self._trained.get(step, draws):
            raise RecordError(
                f"{file} holds {_names(draws)}, and draws.jsonl says that step {step} trained on "
                f"{_names(self._trained[step])}: it belongs to another run."
            )
        return rollout


def _file(folder: Path, step: int) -> Path:
    return folder / RECORD / f"step_{step}.safetensors"


def _state(batch: DataProto) -> list[Any]:
    return [dict(batch.tensors), batch.non_tensor_batch, batch.meta_info]


def _names(draws: set[str]) -> str:
    return ", ".join(sorted(draws, key=lambda uid: (len(uid), uid)))
