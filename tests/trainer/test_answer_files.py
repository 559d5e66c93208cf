"""`trainer.rollout_data_dir`, `validation_data_dir` and `log_val_generations`: their tools find what verl writes."""

from __future__ import annotations

import errno
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.trainer import TrainerConfig
from dovetail.observability.disk import DiskFullError
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.trainer import answer_files
from dovetail.trainer.answer_files import AnswerFiles, paced
from tests.trainer.toy_run import DAPO, Toy, train

pytestmark = pytest.mark.e2e

NAMES = ["input", "output", "gts", "score", "step"]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answer_keys(toy: Toy, tmp_path: Path) -> dict[str, Any]:
    return {
        "data.val_files": str(toy.data / "val.parquet"),
        "custom_reward_function.name": "mostly",
        "actor_rollout_ref.rollout.val_kwargs": {"n": 2, "do_sample": True, "temperature": 1.0},
        "trainer.rollout_data_dir": str(tmp_path / "dumps" / "train"),
        "trainer.validation_data_dir": str(tmp_path / "dumps" / "val"),
        "trainer.total_training_steps": 2,
    }


@pytest.mark.parametrize("algorithm", [{}, DAPO], ids=["grpo", "dapo"])
def test_every_step_has_a_file_with_the_answers_of_the_run_folder(
    toy: Toy, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    keys = algorithm | answer_keys(toy, tmp_path) | {"trainer.val_before_train": True, "trainer.test_freq": 1}
    train(toy.config(tmp_path / "run", keys))
    dumps = tmp_path / "dumps"
    assert sorted(file.name for file in (dumps / "train").iterdir()) == ["1.jsonl", "2.jsonl"]
    assert sorted(file.name for file in (dumps / "val").iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    for step in (1, 2):
        dumped, own = (
            read(dumps / "train" / f"{step}.jsonl"),
            read(tmp_path / "run" / "rollouts" / f"step_{step}.jsonl"),
        )
        assert len(dumped) == 16
        assert [list(row)[:5] for row in dumped] == [NAMES] * 16
        for row, record in zip(dumped, own, strict=True):
            assert (row["output"], row["gts"], row["score"]) == (record["response"], "", record["score"])
            assert (row["acc"], row["pred"], row["step"]) == (record["acc"], record["pred"], step)
            assert re.search(r"say \d+", row["input"])
    for step in (0, 1, 2):
        dumped, own = (
            read(dumps / "val" / f"{step}.jsonl"),
            read(tmp_path / "run" / "validation" / f"step_{step}.jsonl"),
        )
        assert len(dumped) == 8
        for row, record in zip(dumped, own, strict=True):
            assert list(row)[:5] == NAMES
            assert (row["output"], row["score"]) == (record["response"], record["values"]["reward"])
            assert (row["acc"], row["reward"], row["step"]) == (record["values"]["acc"], row["score"], step)
            assert record["prompt"] in row["input"]


def test_a_run_that_only_validates_leaves_its_files_whole(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path / "run", answer_keys(toy, tmp_path) | {"trainer.val_only": True}))
    assert len(read(tmp_path / "dumps" / "val" / "0.jsonl")) == 8
    assert len(read(tmp_path / "run" / "validation" / "step_0.jsonl")) == 8
    assert list((tmp_path / "dumps" / "train").iterdir()) == []


def test_a_full_disk_names_the_key_and_leaves_no_half_file(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path.write_text

    def write(self: Path, text: str, *args: Any, **kwargs: Any) -> int:
        if self.parent.name == "train":
            whole(self, text[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, text, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(DiskFullError, match=r"train/1\.jsonl could not .* set trainer\.rollout_data_dir to another"):
        train(toy.config(tmp_path / "run", answer_keys(toy, tmp_path)))
    assert list((tmp_path / "dumps" / "train").iterdir()) == []
    assert len(read(tmp_path / "run" / "rollouts" / "step_1.jsonl")) == 16


def test_validation_answers_are_shown_in_the_console(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"trainer.val_only": True, "trainer.log_val_generations": 3, "trainer.logger": ["console"]}
    train(toy.config(tmp_path, keys | {"data.val_files": str(toy.data / "val.parquet")}))
    shown = capsys.readouterr().out
    assert len(re.findall(r"^step 0: validation answer, score [\d.]+$", shown, re.MULTILINE)) == 3
    assert len(set(re.findall(r"say \d+", shown))) == 3


class OwnTokenizer:
    """A user's."""

    def __init__(self, decode: Any = None) -> None:
        self.decode = decode


@pytest.mark.parametrize("decode", [None, lambda ids: ""], ids=["pickled", "cannot be pickled"])
def test_the_thread_has_a_tokenizer_of_its_own_which_it_makes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode: Any
) -> None:
    made_in: list[str] = []
    seen: list[tuple[str, Any]] = []

    class Rows:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def of(self, batch: DataProto) -> list[dict[str, Any]]:
            seen.append((threading.current_thread().name, self.tokenizer))
            return []

    def noted(tokenizer: OwnTokenizer, state: dict[str, Any]) -> None:
        made_in.append(threading.current_thread().name)
        tokenizer.__dict__.update(state)

    monkeypatch.setattr(OwnTokenizer, "__setstate__", noted, raising=False)
    monkeypatch.setattr("dovetail.trainer.answer_files.RolloutRows", Rows)
    tokenizer, here = OwnTokenizer(decode), threading.current_thread().name
    files = AnswerFiles(TrainerConfig(), RunFolder(tmp_path), tokenizer)
    assert made_in == ([] if decode is None else [here]), "one that cannot be written down is copied at once"
    batch = DataProto.from_dict({"responses": torch.zeros(1, 2)})
    for step in (1, 2):
        files.write_training(step, batch)
    files.close()
    (first, one), (second, other) = seen
    assert first == second != here
    assert one is other is not tokenizer
    assert made_in == ([first] if decode is None else [here])


def busy(rows: int) -> Iterator[int]:
    for row in range(rows):
        began = time.thread_time()
        while time.thread_time() - began < 0.01:
            pass
        yield row


def test_the_thread_leaves_most_of_the_time_to_the_update() -> None:
    began, used = time.perf_counter(), time.thread_time()
    assert list(paced(busy(10), threading.Event())) == list(range(10))
    assert time.thread_time() - used <= 0.3 * (time.perf_counter() - began)


def test_waiting_for_the_files_ends_their_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_files, "_PAUSE", 1e6)
    files = AnswerFiles(TrainerConfig(), RunFolder(tmp_path), tokenizer=None)
    written: list[int] = []
    monkeypatch.setattr(
        AnswerFiles, "_write_training", lambda self, step, batch: written.extend(paced(busy(3), self._hurry))
    )
    for _ in range(2):  # a step that finds the one before at work
        files.write_training(1, DataProto())
    files.wait()
    assert written == [0, 1, 2] * 2
    files.close()
