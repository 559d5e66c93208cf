"""`dovetail audit` proves what became of every draw from the run folder alone, and exits with 1 when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli.main import main
from dovetail.config import load_config
from dovetail.observability.ledger import DrawLedger
from dovetail.observability.run_folder import RunFolder

pytestmark = pytest.mark.unit

BATCH = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
STALE = (*BATCH, "async_training.mode=fully_async", "async_training.max_staleness=1")


def start(folder: Path, *overrides: str) -> DrawLedger:
    run = RunFolder(folder)
    run.start()
    run.write_config(load_config(overrides=overrides).config.model_dump(mode="json"))
    return DrawLedger(folder)


def train(ledger: DrawLedger, step: int, draws: list[int], version: int) -> None:
    ledger.started(draws, version)
    for draw in draws:
        ledger.finished(draw, [[version, 5]])
    ledger.trained(draws, step)
    ledger.flush(step)


def save(folder: Path, step: int, **state: Any) -> None:
    store = CheckpointStore(folder)
    (store.begin(step) / "trainer.json").write_text(json.dumps({"step": step, **state}))
    store.commit(step, world_size=1)


def audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["audit", str(folder)])
    return code, capsys.readouterr().out


def test_a_sound_run_is_shown_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = start(tmp_path, *STALE)
    with (tmp_path / "config.yaml").open("a") as file:  # an earlier version may have written it
        file.write('"trainer.default_hdfs_dir": null\n')
    train(ledger, 1, [0, 1], version=0)
    train(ledger, 2, [2, 3], version=0)
    ledger.started([4, 5], version=1)
    ledger.finished(4, [[1, 5]])
    ledger.dropped(4, "stale", step=3)
    ledger.flush(3)
    save(tmp_path, 2, num_drawn=4)
    code, out = audit(tmp_path, capsys)
    assert code == 0
    table = {" ".join(line.split()[:-1]): line.split()[-1] for line in out.splitlines() if line.startswith("        ")}
    assert table["draws"] == "6"
    assert (table["trained"], table["dropped (stale)"], table["open"]) == ("4", "1", "1")
    assert (table["trained at staleness 0 2"], table["trained at staleness 1 2"]) == ("50.0%", "50.0%")


@pytest.mark.parametrize("bad", ["twice", "skipped", "stale", "from the future", "other number of draws"])
def test_each_violation_has_its_sentence(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = start(tmp_path, *STALE)
    train(ledger, 1, [0, 1], version=0)
    save(tmp_path, 1, num_drawn=3 if bad == "other number of draws" else 2)
    if bad == "twice":
        ledger.trained([1], step=2)
    elif bad == "skipped":
        train(ledger, 2, [3, 4], version=1)
    elif bad == "stale":
        train(ledger, 3, [2, 3], version=0)
    elif bad == "from the future":
        train(ledger, 2, [2, 3], version=2)
    ledger.flush(2)
    sentence = {
        "twice": "draw 1 ended 2 times",
        "skipped": "draw 2 was skipped",
        "stale": "draw 2 was trained at step 3 with tokens 2 steps old; the bound is 1.",
        "from the future": "weights that did not exist",
        "other number of draws": "global_step_1 holds 3 draws, and the ledger has 2 at the end of step 1.",
    }[bad]
    code, out = audit(tmp_path, capsys)
    assert code == 1
    assert sentence in next(line for line in out.splitlines() if line.startswith("BROKEN"))


def test_a_resumed_run_that_trained_nothing_twice_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = start(tmp_path, *BATCH)
    train(ledger, 1, [0, 1], version=0)
    save(tmp_path, 1, num_drawn=2)
    train(ledger, 2, [2, 3], version=1)
    RunFolder(tmp_path).resume(1)
    ledger = DrawLedger(tmp_path)
    ledger.resume(1, num_drawn=2, was_synchronous=False)
    train(ledger, 2, [2, 3], version=1)
    assert audit(tmp_path, capsys)[0] == 0
    RunFolder(tmp_path).resume(1)
    ledger = DrawLedger(tmp_path)
    train(ledger, 2, [1, 2], version=1)  # the counter of draws went back too far
    code, out = audit(tmp_path, capsys)
    assert code == 1
    assert "draw 1 ended 2 times: trained at step 1, trained at step 2." in out


def test_a_surplus_of_dynamic_sampling_may_be_older(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filters = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score")
    ledger = start(tmp_path, *BATCH, *filters)
    ledger.started([0, 1], version=0)
    ledger.finished(1, [[0, 5]])
    ledger.finished(0, [[0, 5]])
    ledger.trained([0], step=1)
    ledger.trained([1], step=2)
    ledger.flush(2)
    assert audit(tmp_path, capsys)[0] == 0
    ledger.started([2], version=1)
    ledger.finished(2, [[1, 5]])
    ledger.trained([2], step=5)
    ledger.flush(5)
    code, out = audit(tmp_path, capsys)
    assert (code, "the bound is 1" in out) == (1, True)
