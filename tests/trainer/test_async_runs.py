"""Generation ahead of training: the synchronous run where nothing may be stale, and every draw once elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import main
from dovetail.observability.ledger import Ledger, read_ledger, violations
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.run import run_training
from dovetail.trainer.stopping import StopAfterPhase
from dovetail.workers.actor import DataParallelPPOActor
from tests.trainer.test_resume import answers
from tests.trainer.toy_run import DAPO, Toy, repeatable, train

pytestmark = pytest.mark.e2e

PPO = {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True}
GRPO: dict[str, Any] = {}
FRESH = {"async_training.mode": "fully_async", "async_training.max_staleness": 0}
CARRYING = {
    "async_training.mode": "fully_async",
    "async_training.max_staleness": 2,
    "trainer.total_training_steps": 6,
    # Less than two groups at a time: some are half done, some not begun, when a step has what it needs.
    "actor_rollout_ref.rollout.max_num_seqs": 6,
}

AT_ONCE = {"actor_rollout_ref.rollout.max_num_seqs": 256, "async_training.max_in_flight": 64}


def same_run(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what only an asynchronous run reports."""
    return [{key: value for key, value in row.items() if not key.startswith("async/")} for row in repeatable(rows)]


@pytest.mark.parametrize("changes", [GRPO, PPO, DAPO], ids=["grpo", "ppo", "dapo"])
def test_nothing_stale_is_the_synchronous_run_bit_for_bit(toy: Toy, tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {**changes, "trainer.save_freq": 3}
    sync, expected = train(toy.config(tmp_path / "sync", changes))
    config = toy.config(tmp_path / "async", {**changes, **FRESH})
    result, rows = train(config)
    assert same_run(rows) == same_run(expected)
    assert answers(result.folder) == answers(sync.folder)
    assert weights(result.folder) == weights(sync.folder) != {}
    # Groups that dynamic sampling carries over are older, here as there.
    checked_ledger(result.folder, bound=config.surplus_steps)


def test_unfinished_groups_go_on_under_the_next_weights(toy: Toy, tmp_path: Path) -> None:
    result, rows = train(toy.config(tmp_path, CARRYING))
    ledger = checked_ledger(result.folder, bound=2)
    assert ledger.counts() == {"trained": 24}
    versions = [len(record.finishes[0]) for record in ledger.draws.values()]
    assert max(versions) > 1, "no group has tokens of two versions; the run shows nothing"
    ages = [record.staleness() for record in ledger.draws.values()]
    assert max(age for age in ages if age is not None) == max(row["async/staleness/max"] for row in rows) > 0


def test_the_ledger_is_on_the_disk_before_the_manifest_of_a_checkpoint(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bytes]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((file.name, (tmp_path / "draws.jsonl").read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    once = {"trainer.total_training_steps": 1, "trainer.save_freq": 1}
    train(toy.config(tmp_path, {**CARRYING, **once}))
    names = [name for name, _ in flushed]
    manifest = next(number for number, name in enumerate(names) if "manifest.json" in name)
    ledger = names.index("draws.jsonl")
    assert ledger < names.index(tmp_path.name) < manifest, names
    assert flushed[ledger][1] == flushed[manifest][1] != b"", "lines were added that a power cut would lose"


def test_old_log_probs_are_interpolated_in_place_of_a_pass(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    update = DataParallelPPOActor.update

    def watched(self: DataParallelPPOActor, data: DataProto) -> Any:
        seen.append((len(seen) + 1, data.tensors["interpolation_weights"].unique().tolist()))
        assert "old_log_probs" not in data
        return update(self, data)

    monkeypatch.setattr(DataParallelPPOActor, "update", watched)
    prox = {"async_training.prox": "loglinear", "algorithm.rollout_correction.rollout_is": "token"}
    _, rows = train(toy.config(tmp_path, {**CARRYING, **prox}))
    for (step, weights), row in zip(seen, rows, strict=True):
        oldest = int(row["async/staleness/max"])
        assert row["step"] == step
        assert weights[-1] == pytest.approx(oldest / (oldest + 1))
        assert "timing_s/old_log_prob" not in row
        assert 0 < row["rollout_corr/eff_sample_size"] <= 1 + 1e-6
    assert max(weights[-1] for _, weights in seen) > 0


@pytest.mark.parametrize("cut", ["stopped", "killed"])
def test_a_resumed_run_continues_what_was_unfinished(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """The tokens that were there stay; on this engine the others come out as they would have."""
    saving = {**CARRYING, "trainer.save_freq": 1}
    whole, expected = train(toy.config(tmp_path / "whole", saving))
    learn = RayPPOTrainer.learn

    def cut_off(self: RayPPOTrainer, rollout: Any) -> Any:
        if self.global_step == 4:
            raise StopAfterPhase if cut == "stopped" else RuntimeError("killed")
        return learn(self, rollout)

    config = toy.config(tmp_path / "cut", saving)
    with monkeypatch.context() as patch:
        patch.setattr(RayPPOTrainer, "learn", cut_off)
        if cut == "stopped":
            train(config)
        else:
            with pytest.raises(RuntimeError, match="killed"):
                train(config)
    _, rows = train(config)
    checked_ledger(tmp_path / "cut", bound=2)
    assert read_draws(tmp_path / "cut") == read_draws(whole.folder)
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row, other in zip(same_run(rows), same_run(expected), strict=True):
        assert row == pytest.approx(other, abs=1e-5)


def test_a_run_may_change_its_mode_when_it_is_resumed(
    toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it generates from there on has the version of the weights it was resumed with."""
    for mode, steps in (("off", 2), ("fully_async", 3), ("off", 4), ("fully_async", 5)):
        config = toy.config(tmp_path, {**CARRYING, "trainer.save_freq": 1, "async_training.mode": mode})
        result = run_training(
            config, use_ray=False, on_step=lambda step, _, last=steps: "stop" if step == last else None
        )
        assert result.steps == steps
    ledger = checked_ledger(tmp_path, bound=2)
    assert {record.starts[0] for record in ledger.draws.values()} == {2, 3, 4}
    assert "groups that an asynchronous run had generated ahead" in caplog.text


def test_nothing_is_generated_ahead_for_steps_that_a_surplus_fills(toy: Toy, tmp_path: Path) -> None:
    """A round fills nearly three steps: one generated for each step would grow too old, or be left at the end."""
    ahead = {"async_training.max_staleness": 1, "trainer.total_training_steps": 8}
    config = toy.config(tmp_path, {**CARRYING, **DAPO, **ahead})
    result, _ = train(config)
    ledger = checked_ledger(result.folder, bound=config.group_staleness_bound)
    counts = ledger.counts()
    assert counts["trained"] == 8 * 4
    assert sum(counts.values()) == 9 * 4, counts


@pytest.mark.parametrize("order", ["finish", "draw"])
def test_a_lower_bound_holds_from_the_step_it_is_resumed_at(toy: Toy, tmp_path: Path, order: str) -> None:
    """What is too old for it is dropped; what was trained before is judged by the bound of then."""
    for bound, steps in ((2, 3), (0, 5)):
        changes = {"trainer.save_freq": 1, "async_training.max_staleness": bound, "async_training.order": order}
        config = toy.config(tmp_path, {**CARRYING, **changes})
        run_training(config, use_ray=False, on_step=lambda step, _, last=steps: "stop" if step == last else None)
    draws = read_draws(tmp_path).values()
    ages = {step: max(draw.staleness() or 0 for draw in draws if step in draw.trained) for step in (3, 4, 5)}
    assert ages[3] > ages[4] == ages[5] == 0
    assert sum(draw.dropped == ["too old"] for draw in draws) > 0
    assert main(["audit", str(tmp_path)]) == 0


def test_a_surplus_beyond_a_lower_bound_is_dropped(toy: Toy, tmp_path: Path) -> None:
    """At step 5: the checkpoint of step 3 has 8 groups of version 0, and dynamic sampling keeps groups for 3 steps."""
    for bound, steps in ((4, 3), (0, 5)):
        changes = {"async_training.max_staleness": bound, "trainer.save_freq": 3, **AT_ONCE}
        config = toy.config(tmp_path, {**CARRYING, **DAPO, **changes})
        run_training(config, use_ray=False, on_step=lambda step, _, last=steps: "stop" if step == last else None)
    draws = read_draws(tmp_path).values()
    oldest = [draw for draw in draws if draw.finishes and draw.finishes[-1][0][0] == 0]
    assert {step for draw in oldest for step in draw.trained} == {1, 2, 3, 4}
    assert {draw.state for draw in oldest} == {"trained", "dropped"}
    assert main(["audit", str(tmp_path)]) == 0


def checked_ledger(folder: Path, *, bound: int) -> Ledger:
    ledger = read_ledger(folder)
    assert ledger is not None
    assert list(violations(ledger, bound=bound)) == []
    return ledger


def read_draws(folder: Path) -> Mapping[int, Any]:
    ledger = read_ledger(folder)
    assert ledger is not None
    return ledger.draws


def weights(folder: Path) -> dict[str, str]:
    """Checksums of the policy's shards in the last checkpoint."""
    step = RunFolder(folder).read_metrics()[-1]["step"]
    files = json.loads((folder / f"global_step_{step}" / "manifest.json").read_text())["files"]
    return {name: record["sha256"] for name, record in files.items() if name.endswith(".distcp")}
