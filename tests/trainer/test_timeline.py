"""A run leaves who worked on what, what it is doing now, and which characters each token stands for."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.observability.console import PlainConsole
from dovetail.observability.run_folder import RunFolder, read_json_lines
from dovetail.observability.stalls import StalledError
from dovetail.observability.timers import PhaseTimers
from dovetail.protocol import DataProto
from dovetail.trainer.answers import RolloutRows
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.timeline import MOST_WORKERS, take_timeline
from dovetail.trainer.token_text import token_ends
from tests.models.tiny import tiny_tokenizer
from tests.rewards.test_runner import answers
from tests.trainer.toy_run import Toy, train


@pytest.mark.e2e
def test_a_run_writes_a_timeline_its_present_phase_and_the_text_of_tokens(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path, {"trainer.total_training_steps": 2}))
    lines = list(read_json_lines(tmp_path / "timeline.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    started = [phase for worker, phase, *_ in lines[0]["spans"] if worker == "driver"]
    assert started == ["read_inputs", "start_cluster", "start_processes", "init_models"]
    assert not any(name.removeprefix("timing_s/") in started for name in RunFolder(tmp_path).read_metrics()[0])
    spans = lines[2]["spans"]
    assert {phase for worker, phase, *_ in spans if worker == "driver"} >= {"gen", "old_log_prob", "adv"}
    calls = {phase: (start, end, gib) for worker, phase, start, end, gib in spans if worker == "worker 0"}
    assert {"generate_sequences", "compute_log_prob", "update_actor"} <= set(calls)
    assert all(0 <= start <= end and 0.01 < gib < 100 for start, end, gib in calls.values())
    assert calls["generate_sequences"][1] <= calls["update_actor"][0]
    now = json.loads((tmp_path / "now.json").read_text())
    assert (now["step"], now["total_steps"], now["phase"], now["pid"]) == (2, 2, None, os.getpid())
    assert now["finished"] is True
    row = next(read_json_lines(tmp_path / "rollouts" / "step_2.jsonl"))
    assert all(0 <= value == round(value, 5) for value in row["token_entropies"])
    assert len(row["token_ends"]) == len(row["response_ids"]) == len(row["token_entropies"])
    assert row["token_ends"] == sorted(row["token_ends"])
    assert row["token_ends"][-1] == len(row["response"])


@pytest.mark.e2e
def test_a_run_that_stalls_says_so_in_its_folder_and_who_waited_before(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "the trainer waits for draw 3; draw 3 waits for engine 0"
    noted, shown = [], []
    monkeypatch.setattr(PlainConsole, "wait", lambda _, words: shown.append(words))

    def stalls(trainer: RayPPOTrainer) -> dict[str, float]:
        with trainer.timers("gen"):
            trainer._note_wait(words)
            trainer._wait_noted_at -= 60.0
            trainer._note_wait(words)
            noted.append(json.loads((tmp_path / "now.json").read_text()))
            raise StalledError(f"no progress for 300 s: {words}.")

    monkeypatch.setattr(RayPPOTrainer, "_train_step", stalls)
    keys = {"data.val_files": str(toy.data / "val.parquet"), "trainer.val_before_train": True}
    with pytest.raises(StalledError):
        train(toy.config(tmp_path, keys | {"trainer.logger": ["console"]}))
    assert shown == [words], "once, after five seconds"
    assert (noted[0]["phase"], noted[0]["waits"]) == ("gen", words)
    now = json.loads((tmp_path / "now.json").read_text())
    assert now["failed"] == f"It failed in phase 'gen' of step 1: no progress for 300 s: {words}."
    event = RunFolder(tmp_path).read_events()[-1]
    assert (event["kind"], event["phase"], event["step"]) == ("stalled", "gen", 1)
    # The validation before the first step is a phase, too: a page shows what the run does.
    (start,) = read_json_lines(tmp_path / "timeline.jsonl")
    assert "testing" in {phase for worker, phase, *_ in start["spans"] if worker == "driver"}


@pytest.mark.e2e
@pytest.mark.usefixtures("unfrozen")
def test_what_two_steps_have_built_is_kept_from_the_garbage_collector(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []
    step = RayPPOTrainer._train_step

    def watched(trainer: RayPPOTrainer) -> dict[str, float]:
        frozen.append(gc.get_freeze_count())
        return step(trainer)

    monkeypatch.setattr(RayPPOTrainer, "_train_step", watched)
    train(toy.config(tmp_path, {"trainer.total_training_steps": 4}))
    assert frozen[:2] == [0, 0]
    assert min(frozen[2:]) > 10_000
    assert gc.get_freeze_count() == 0, "the process lives on"


@pytest.mark.unit
def test_a_resumed_timeline_ends_where_the_run_resumes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start()
    for step in (1, 2, 3):
        folder.log_timeline(step, [("driver", "gen", 100.0 + step, 101.5 + step, None)])
    folder.log_timeline(4, [])
    folder.resume(2)
    lines = list(read_json_lines(tmp_path / "timeline.jsonl"))
    assert lines == [
        {"step": step, "time": 100.0 + step, "spans": [["driver", "gen", 0.0, 1.5, None]]} for step in (1, 2)
    ]


@pytest.mark.unit
def test_an_engine_that_did_nothing_in_a_step_is_on_its_timeline() -> None:
    engines = [[("generate_groups", 1.5, 1.75)], []]
    rows = take_timeline(PhaseTimers(), _ManyProcesses(), engines)  # type: ignore[arg-type]
    assert [row for row in rows if row[0].startswith("engine ")] == [
        ("engine 0", "generate_groups", 1.5, 1.75, None),
        ("engine 1", "generate_groups", 2.0, 2.0, None),
    ]


class _ManyProcesses:
    def take_spans(self) -> list[list[object]]:
        from dovetail.controller.spans import Span

        return [[Span("actor", "update_actor", 1.0, 2.0, None)] for _ in range(1000)]


@pytest.mark.unit
def test_a_timeline_of_a_thousand_ranks_shows_some_of_them() -> None:
    timers = PhaseTimers()
    with timers("step"), timers("gen"):
        pass
    engines = [[("generate_groups", 1.0, 2.0)]] * 200
    rows = take_timeline(timers, _ManyProcesses(), engines)  # type: ignore[arg-type]
    workers = [worker for worker, *_ in rows]
    assert workers[:2] == ["driver", "worker 0"]
    assert "engine 0" in workers
    assert len([worker for worker in workers if worker.startswith("worker ")]) <= MOST_WORKERS
    assert len([worker for worker in workers if worker.startswith("engine ")]) <= MOST_WORKERS
    assert timers.take_spans() == []


@pytest.mark.unit
def test_rows_of_a_second_batch_with_no_new_token_are_as_whole_as_the_first() -> None:
    batch = answers("good", "no")
    mask = batch.tensors["response_mask"].float()
    gaps = {"old_log_probs": -1.0 * mask, "rollout_log_probs": -1.123456 * mask}
    reasons = {"finish_reason": ["stop", "length"]}
    versions = {"weight_version": torch.where(mask > 0, torch.tensor([[7], [8]]), -1)}
    versions["weight_version"][0, 2:] += 1
    batch = batch.union(DataProto.from_dict({"advantages": 0.25 * mask, **gaps, **versions}, reasons))
    rows = RolloutRows(tiny_tokenizer())
    first, second = list(rows.of(batch)), list(rows.of(batch))
    for row, again, text in zip(first, second, ("good", "no"), strict=True):
        assert row["response"] == text
        assert row["token_ends"].tolist() == list(range(1, len(text) + 1))
        assert row["token_advantages"].tolist() == [0.25] * len(text)
        assert row["token_logprob_gaps"].tolist() == [0.12346] * len(text)
        assert row["token_versions"].tolist() == ([[7, 2], [8, 2]] if text == "good" else [[8, 2]])
        assert row["truncated"] == (text == "no")
        assert {name: np.asarray(value).tolist() for name, value in again.items()} == {
            name: np.asarray(value).tolist() for name, value in row.items()
        }


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "pieces", "parts"),
    [
        ("The sum is 12", ["The", " sum", " is", " ", "1", "2", ""], ["The", " sum", " is", " ", "1", "2", ""]),
        ("the cat", ["the", "cat"], ["the", " cat"]),
        ("a é b", ["a", " ", "�", "�", " b"], ["a", " ", "", "é", " b"]),
        ("日本", ["�", "�", "�", "本"], ["", "", "日", "本"]),
        ("8 ≡ 22", ["8", " �", "�", " ", "2", "2"], ["8", "", " ≡", " ", "2", "2"]),
        ("a�b", ["a", "�", "b"], ["a", "�", "b"]),
        ("ok�", ["ok", "�"], ["ok", "�"]),
        ("", [""], [""]),
    ],
)
def test_every_character_of_an_answer_belongs_to_one_token(text: str, pieces: list[str], parts: list[str]) -> None:
    ends = token_ends(text, pieces)
    assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == parts
