"""The files of a step's answers: the run folder's, and those of `trainer.rollout_data_dir` and `validation_data_dir`.

Written in a thread of their own, beside the step; every file appears only when it is complete. In one process with the
trainer, that thread holds the interpreter while the update launches its kernels, and the device waits for them. So it
pauses after every row, as long as the update runs.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from dovetail.config.trainer import TrainerConfig
from dovetail.observability.background import Background
from dovetail.observability.run_folder import RunFolder, write_json_lines
from dovetail.protocol import DataProto
from dovetail.rewards.columns import dump_records
from dovetail.trainer.answers import RolloutRows
from dovetail.trainer.validation import Validation

T = TypeVar("T")
# Times the seconds that a row took: the thread has a quarter of the interpreter's time. On an H200 it ends the update
# of 512 responses 0.25 s sooner than without pauses.
_PAUSE = 3.0
Dump = Callable[[DataProto, list[str]], list[dict[str, Any]]]


class AnswerFiles:
    """`close` it when the run ends: it waits for the last file and raises what went wrong with it."""

    def __init__(self, settings: TrainerConfig, folder: RunFolder, tokenizer: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._work = Background("answers")
        self._hurry = threading.Event()
        self._driver_tokenizer = tokenizer
        self._load_tokenizer = _copied_later(tokenizer)

    def write_training(self, step: int, batch: DataProto) -> None:
        """With pauses, until `hurry`."""
        self.wait()
        self._hurry.clear()
        self._work.submit(lambda: self._write_training(step, batch))

    def write_validation(self, step: int, validation: Validation) -> None:
        self._work.submit(lambda: self._write_validation(step, validation))

    def validation_dump(self, step: int) -> Dump | None:
        """What makes the lines of a validation's batch; None when nobody has asked for them."""
        if self._settings.validation_data_dir is None and not self._settings.log_val_generations:
            return None

        def dump(batch: DataProto, solution_strs: list[str]) -> list[dict[str, Any]]:
            rows = dump_records(batch, self._driver_tokenizer, solution_strs, step)
            return [{**row, "reward": row["score"]} for row in rows]

        return dump

    def hurry(self) -> None:
        """The update is over; what comes next must not find the thread still at work."""
        self._hurry.set()

    def wait(self) -> None:
        self.hurry()
        self._work.wait()

    def close(self) -> None:
        self.hurry()
        self._work.close()

    @cached_property
    def _tokenizer(self) -> Any:
        """The thread's own, made there: one tokenizer is not for two threads, and the driver reads prompts with its."""
        return self._load_tokenizer()

    @cached_property
    def _rows(self) -> RolloutRows:
        return RolloutRows(self._tokenizer)

    def _write_training(self, step: int, batch: DataProto) -> None:
        batch = _scored_first(batch)
        if self._settings.rollout_data_dir is None:
            self._folder.write_answers(step, paced(self._rows.of(batch), self._hurry))
            return
        rows = list(paced(self._rows.of(batch), self._hurry))
        self._folder.write_answers(step, rows)
        answers = [row["response"] for row in rows]
        self._write_dump("rollout_data_dir", step, dump_records(batch, self._tokenizer, answers, step))

    def _write_validation(self, step: int, validation: Validation) -> None:
        self._folder.write_answers(step, validation.rows, "validation")
        if self._settings.validation_data_dir is not None:
            self._write_dump("validation_data_dir", step, validation.dumped)

    def _write_dump(self, key: str, step: int, rows: list[dict[str, Any]]) -> None:
        file = Path(getattr(self._settings, key)) / f"{step}.jsonl"
        write_json_lines(file, rows, advice=f"free some space, or set trainer.{key} to another disk")


def paced(rows: Iterable[T], hurry: threading.Event) -> Iterator[T]:
    """`rows`, with a pause after each, until `hurry` is set."""
    began = time.thread_time()
    for row in rows:
        yield row
        hurry.wait(_PAUSE * (time.thread_time() - began))
        began = time.thread_time()


def _copied_later(tokenizer: Any) -> Callable[[], Any]:
    """What makes a copy without reading the original. Now it is only written down: that is a fifth of the time."""
    try:
        written = pickle.dumps(tokenizer, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError):  # a user's own, with a lambda in it
        copied = copy.deepcopy(tokenizer)
        return lambda: copied
    return lambda: pickle.loads(written)


def _scored_first(batch: DataProto) -> DataProto:
    """Rows that get their old log-probs from the update come last: a file's first rows have all numbers of a token,
    also where there is no room for those of every row."""
    old = batch.tensors.get("old_log_probs")
    late = torch.zeros(len(batch)) if old is None else old.isnan().any(dim=1)
    return batch.select_idxs(late.int().argsort(stable=True)) if late.any() else batch
