"""A recorded asynchronous run trained again on its batches: the same weights and metrics; a wrong record is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.cli.main import main
from dovetail.observability.ledger import DrawLedger
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.rewards.runner import RewardResult
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.recording import RecordError, Recording, Rollout, write_record
from dovetail.trainer.replay import compare
from dovetail.trainer.run import run_training
from dovetail.workers import actor_rollout_ref
from tests.trainer.test_async_runs import CARRYING, GRPO, weights
from tests.trainer.toy_run import DAPO, Toy, train

PPO = {"algorithm.adv_estimator": "gae", "async_training.prox": "recompute"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(GRPO, id="grpo", marks=pytest.mark.slow),
        pytest.param(PPO, id="ppo", marks=pytest.mark.slow),
        pytest.param(DAPO, id="dapo"),
    ],
)
def test_a_replay_gets_the_same_weights_bit_for_bit(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: Any
) -> None:
    """Also of a run that was killed and continued. Needs no engine. Three runs: the claim is about whole ones."""
    recorded = {"async_training.record": True, "trainer.save_freq": 2, "data.val_files": str(toy.data / "val.parquet")}
    config = toy.config(tmp_path, {**CARRYING, **recorded, **changes})
    learn = RayPPOTrainer.learn

    def killed(self: RayPPOTrainer, rollout: Rollout) -> Any:
        trained = learn(self, rollout)
        if self.global_step == 4:
            raise RuntimeError("killed")
        return trained

    with monkeypatch.context() as patch:
        patch.setattr(RayPPOTrainer, "learn", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(config)
    train(config)
    with monkeypatch.context() as patch:
        patch.setattr(actor_rollout_ref, "HybridEngine", None)
        patch.setattr(RayPPOTrainer, "collect", None)
        assert main(["replay", str(tmp_path), "--local"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("6 steps replayed:")
    assert said.endswith("global_step_6")
    assert weights(tmp_path / "replay") == weights(tmp_path) != {}
    ours, theirs = RunFolder(tmp_path / "replay").read_metrics(), RunFolder(tmp_path).read_metrics()
    for name in ("actor/grad_norm", "actor/pg_loss", "async/staleness/mean", "critic/score/mean", "training/epoch"):
        assert [row[name] for row in ours] == [row[name] for row in theirs]
    assert max(row["async/staleness/max"] for row in theirs) > 0, "nothing was stale; the run shows nothing"

    assert main(["replay", str(tmp_path), "--local"]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.e2e
def test_a_run_that_went_on_from_another_ones_checkpoint_is_replayed_from_it(
    toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {**CARRYING, "async_training.record": True, "trainer.save_freq": 1, "trainer.total_training_steps": 3}
    run_training(toy.config(tmp_path / "a", keys), use_ray=False, on_step=lambda step, _: "stop" if step == 1 else None)
    checkpoint = str(tmp_path / "a/global_step_1")
    keys |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": checkpoint}
    train(toy.config(tmp_path / "b", keys))
    assert main(["replay", str(tmp_path / "b"), "--local"]) == 0
    assert weights(tmp_path / "b/replay") == weights(tmp_path / "b") != {}
    assert "generated ahead" not in caplog.text, "the record has these groups"


def record(folder: Path, step: int, *, draw: int | None = None) -> None:
    uids = np.array([f"draw-{step if draw is None else draw}"], dtype=object)
    batch = DataProto.from_dict({"responses": torch.tensor([[step]])}, {"uid": uids}, {"temperature": 1.0})
    scores = DataProto.from_dict({"token_level_scores": torch.tensor([[0.1]])})
    result = RewardResult(scores, {"reward/failed": 0.0}, {})
    write_record(folder, step, Rollout(batch, [0], result, {"training/epoch": 0}), result)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three recorded steps with a draw each."""
    ledger = DrawLedger(tmp_path)
    for step in (1, 2, 3):
        RunFolder(tmp_path).log_metrics(step, {})
        record(tmp_path, step)
        ledger.trained([step], step)
        ledger.flush(step)
    return tmp_path


@pytest.mark.unit
def test_a_recorded_batch_comes_back_as_it_was(run: Path) -> None:
    recording = Recording(run)
    assert recording.last_step == 3
    rollout = recording.read(2)
    assert rollout.batch.tensors["responses"].tolist() == [[2]]
    assert rollout.batch.meta_info == {"temperature": 1.0}
    assert isinstance(rollout.rewards, RewardResult)
    assert rollout.rewards.columns.tensors["token_level_scores"].tolist() == [[pytest.approx(0.1)]]
    assert (rollout.order, rollout.metrics) == ([0], {"training/epoch": 0})


@pytest.mark.unit
def test_a_run_that_went_on_from_a_checkpoint_and_finished_no_step_has_nothing_to_replay(run: Path) -> None:
    """Metrics of the checkpoint's own step are in its folder, as of every run that went on."""
    with pytest.raises(RecordError, match="has no finished step, so there is nothing to replay"):
        Recording(run, first_step=4)


@pytest.mark.unit
def test_what_a_replay_changed_is_named(tmp_path: Path) -> None:
    for name, loss in (("run", 0.5), ("replay", 0.25)):
        for step in (1, 2):
            metrics = {"actor/pg_loss": loss if step == 2 else 1.0, "timing_s/step": loss, f"only/{name}": loss}
            RunFolder(tmp_path / name).path.mkdir(exist_ok=True)
            RunFolder(tmp_path / name).log_metrics(step, metrics)
    replay = compare(tmp_path / "run", tmp_path / "replay")
    assert replay.differences == ["step 2: actor/pg_loss is 0.25, and was 0.5."]
    assert (replay.num_steps, replay.num_metrics) == (2, 4)


@pytest.mark.unit
def test_a_record_that_cannot_be_replayed_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "record" / "step_2.safetensors"
    record(run, 2, draw=7)
    with pytest.raises(RecordError, match=r"step_2\.safetensors holds draw-7, .* trained on draw-2: .*another run"):
        Recording(run).read(2)
    shutil.copy(run / "record" / "step_1.safetensors", file)
    with pytest.raises(RecordError, match="is the record of step 1, not of step 2"):
        Recording(run).read(2)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RecordError, match=r"step_2\.safetensors cannot be read"):
        Recording(run).read(2)
    file.unlink()
    with pytest.raises(RecordError, match=r"incomplete: .*step_2\.safetensors is missing; "):
        Recording(run)
    shutil.rmtree(run / "record")
    with pytest.raises(RecordError, match=r"no record of its batches; train with async_training\.record=True"):
        Recording(run)
    assert main(["replay", str(run)]) == 2
    assert "is no run folder: its config.yaml cannot be read" in capsys.readouterr().err


@pytest.mark.unit
def test_a_resumed_run_forgets_the_record_of_steps_that_it_repeats(run: Path) -> None:
    RunFolder(run).resume(2)
    assert sorted(file.name for file in (run / "record").iterdir()) == ["step_1.safetensors", "step_2.safetensors"]
    assert Recording(run).last_step == 2
