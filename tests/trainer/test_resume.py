"""A run that is killed and started again writes the same metrics as one that was not, bit for bit."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import tests.ranks  # noqa: F401  the fork server has torch and the models imported then
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.checkpoint.store import CheckpointStore
from dovetail.config import ConfigError
from dovetail.data.files import write_rows
from dovetail.protocol import DataProto
from tests.trainer.killed_run import DIED_IN, Moment, run_until_killed
from tests.trainer.toy_run import DAPO, Toy, repeatable, train

pytestmark = pytest.mark.e2e

STEPS, KILLED_AT = 5, 3
SAVING = {"trainer.total_training_steps": STEPS, "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 2}
GRPO = {
    **SAVING,
    "actor_rollout_ref.actor.shuffle": True,
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
}
PPO = {
    **SAVING,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 50,
    "trainer.test_freq": 2,
}
CARRYING = {**SAVING, **DAPO}
PHASE = {"generation": "gen", "update": "update_actor", "save": "save_checkpoint"}
Recorded = tuple[list[dict[str, Any]], dict[str, str]]
_references: dict[str, Recorded] = {}


def answers(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted((folder / "rollouts").iterdir())}


def reference(name: str, toy: Toy, changes: dict[str, Any], folder: Path) -> Recorded:
    """Metrics and answers of the uninterrupted run; made once for each configuration."""
    if name not in _references:
        result, rows = train(toy.config(folder, changes))
        _references[name] = repeatable(rows), answers(result.folder)
    return _references[name]


@pytest.mark.parametrize(
    ("name", "changes", "moment"),
    [
        ("grpo", GRPO, "generation"),
        pytest.param("grpo", GRPO, "update", marks=pytest.mark.slow),
        ("grpo", GRPO, "save"),
        pytest.param("grpo", GRPO, "after_save", marks=pytest.mark.slow),
        ("ppo", PPO, "update"),
        pytest.param("dapo", CARRYING, "generation", marks=pytest.mark.slow),
        ("dapo", CARRYING, "after_save"),
    ],
)
def test_a_killed_run_ends_as_an_uninterrupted_one(
    toy: Toy, tmp_path: Path, name: str, changes: dict[str, Any], moment: Moment
) -> None:
    if name == "ppo":
        changes = {**changes, "data.val_files": str(toy.data / "val.parquet")}
    expected, expected_answers = reference(name, toy, changes, tmp_path / "whole")
    config = toy.config(tmp_path / "killed", changes)
    assert run_until_killed(config, moment, KILLED_AT) == -signal.SIGKILL
    folder = tmp_path / "killed"
    if moment in PHASE:
        assert (folder / DIED_IN).read_text() == PHASE[moment]
    latest = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert latest == (KILLED_AT if moment == "after_save" else KILLED_AT - 1)

    result, rows = train(config)
    assert result.steps == STEPS
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert repeatable(rows) == expected
    assert answers(folder) == expected_answers
    assert not list(folder.glob(".global_step_*"))
    assert sorted(path.name for path in folder.glob("global_step_*")) == ["global_step_4", "global_step_5"]
    if name == "dapo":
        # The case is worth its name only if groups were waiting in the checkpoint it resumed from.
        assert rows[latest - 1]["train/groups_carried_over"] > 0


@pytest.mark.slow
def test_a_run_killed_at_three_random_moments_ends_as_an_uninterrupted_one(toy: Toy, tmp_path: Path) -> None:
    """Whatever it does at that moment; the seed of the moments is in the message of a failure."""
    expected, expected_answers = reference("grpo", toy, GRPO, tmp_path / "whole")
    _, measured = train(toy.config(tmp_path / "measured", GRPO))
    # The clock of `any` starts with the first step. By the fastest one: other tests' work may have slowed some down.
    duration = STEPS * min(row["timing_s/step"] for row in measured)
    seed = random.SystemRandom().randrange(10**6)
    moments = [random.Random(seed + number).uniform(0.0, 0.6 * duration) for number in range(3)]
    config = toy.config(tmp_path / "killed", GRPO)
    codes = [run_until_killed(config, "any", after=seconds) for seconds in moments]
    _, rows = train(config)
    said = f"seed {seed}, killed after {moments}, exit codes {codes}"
    assert -signal.SIGKILL in codes, said
    assert set(codes) <= {0, -signal.SIGKILL}, said
    assert repeatable(rows) == expected, said
    assert answers(tmp_path / "killed") == expected_answers, said


def test_a_finished_run_that_is_started_again_changes_nothing_and_says_so(
    toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = toy.config(tmp_path, {"trainer.save_freq": 1})
    _, first = train(config)
    assert "nothing is left to train" not in caplog.text
    result, again = train(config)
    assert result.steps == 3
    assert again == first
    assert f"{tmp_path} is at step 3 of 3: nothing is left to train" in caplog.text


def test_resume_mode_chooses_the_checkpoint(toy: Toy, tmp_path: Path) -> None:
    config = toy.config(tmp_path / "a", {"trainer.save_freq": 1})
    _, whole = train(config)
    chosen = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(tmp_path / "a" / "global_step_1"),
    }
    _, from_path = train(toy.config(tmp_path / "b", chosen))
    assert repeatable(from_path) == repeatable(whole)
    _, anew = train(toy.config(tmp_path / "a", {"trainer.resume_mode": "disable"}))
    assert repeatable(anew) == repeatable(whole)
    assert (tmp_path / "a" / "previous_1" / "metrics.jsonl").exists()


def test_later_checkpoints_are_not_those_of_a_run_that_goes_on_from_an_earlier_one(toy: Toy, tmp_path: Path) -> None:
    _, whole = train(toy.config(tmp_path, {"trainer.save_freq": 1}))
    back = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "global_step_1")}
    # It ends before it saves: what is there then is what a run without a mode of its own continues from.
    _, rows = train(toy.config(tmp_path, {**back, "trainer.total_training_steps": 1}))
    assert [row["step"] for row in rows] == [1]
    assert CheckpointStore(tmp_path).steps() == [1]
    assert CheckpointStore(tmp_path / "previous_1").steps() == [2, 3]
    assert (tmp_path / "previous_1" / "config.yaml").exists()
    _, again = train(toy.config(tmp_path, {"trainer.save_freq": 1}))
    assert repeatable(again) == repeatable(whole)
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3]


def test_a_checkpoint_without_a_critic_is_refused_by_a_run_with_one(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path / "run", {"trainer.save_freq": 1, "trainer.total_training_steps": 1}))
    with pytest.raises(BrokenCheckpoint, match="trained no critic, and this one does; `dovetail export`") as refused:
        train(toy.config(tmp_path / "run", {"algorithm.adv_estimator": "gae"}))
    assert not refused.value.damaged


def test_a_folder_of_another_method_is_named_as_such(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path / "run", {"trainer.save_freq": 1, "trainer.total_training_steps": 1}))
    rows = [{"prompt": f"say {number}", "response": "4"} for number in range(4)]
    other = {"trainer.method": "sft", "data.train_files": str(write_rows(rows, tmp_path / "chats.jsonl"))}
    with pytest.raises(BrokenCheckpoint, match=r"a run with trainer.method=rl, and this one has sft") as refused:
        train(toy.config(tmp_path / "run", other))
    assert not refused.value.damaged


def test_adapters_go_on_with_the_scale_that_they_were_trained_with(toy: Toy, tmp_path: Path) -> None:
    section = "actor_rollout_ref.model"
    lora = {"trainer.save_freq": 1, f"{section}.lora_rank": 4, f"{section}.lora_alpha": 8}
    _, expected = train(toy.config(tmp_path / "whole", lora))
    train(toy.config(tmp_path / "run", {**lora, "trainer.total_training_steps": 2}))
    with pytest.raises(BrokenCheckpoint, match=r"lora_alpha=8.*this run's lora_alpha=32.*set lora_alpha=8") as refused:
        train(toy.config(tmp_path / "run", {**lora, f"{section}.lora_alpha": 32}))
    assert not refused.value.damaged
    assert repeatable(train(toy.config(tmp_path / "run", lora))[1]) == repeatable(expected)


def test_checkpoints_of_an_earlier_run_are_not_those_of_a_run_that_starts_over(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path, {"trainer.save_freq": 1, "trainer.total_training_steps": 2}))
    anew = {"trainer.resume_mode": "disable", "trainer.total_training_steps": 1}
    train(toy.config(tmp_path, {**anew, "trainer.val_only": True, "data.val_files": str(toy.data / "val.parquet")}))
    assert CheckpointStore(tmp_path).steps() == [1, 2], "a validation leaves them where they are"
    train(toy.config(tmp_path, anew))
    assert CheckpointStore(tmp_path).latest() is None
    earlier = next(folder for folder in tmp_path.glob("previous_*") if CheckpointStore(folder).steps())
    assert CheckpointStore(earlier).latest() == earlier / "global_step_2"


def test_groups_that_an_older_version_carried_over_in_int64_are_trained_on(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**DAPO, "trainer.save_freq": 1}
    _, expected = train(toy.config(tmp_path / "whole", keys))
    carried = [row["train/groups_carried_over"] for row in expected]
    step = next(n for n, count in enumerate(carried, 1) if 0 < count < 4)  # not enough for a batch of its own
    load = DataProto.load_from_disk

    def in_int64(file: Path) -> DataProto:
        groups = load(file)
        assert any(column.dtype in (torch.int8, torch.int32) for column in groups.tensors.values())
        wide = {n: c if c.dtype.is_floating_point else c.long() for n, c in groups.tensors.items()}
        return DataProto.from_dict(wide, groups.non_tensor_batch, groups.meta_info)

    monkeypatch.setattr(DataProto, "load_from_disk", in_int64)
    path = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(tmp_path / "whole" / f"global_step_{step}"),
    }
    _, rows = train(toy.config(tmp_path / "resumed", {**keys, **path}))
    assert repeatable(rows)[-1] == repeatable(expected)[-1]


def test_a_missing_resume_path_is_refused(toy: Toy, tmp_path: Path) -> None:
    chosen = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "nothing")}
    with pytest.raises(ConfigError, match="nothing is no folder; give a global_step_N folder"):
        train(toy.config(tmp_path / "run", chosen))


def test_epochs_are_not_counted_with_another_batch_size_than_before(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path, {"trainer.total_training_steps": 1, "trainer.save_freq": 1}))
    epochs = {"trainer.total_training_steps": None, "trainer.total_epochs": 2, "data.train_batch_size": 2}
    # Two epochs of 32 rows, of which the first step took 4, two at a time.
    with pytest.raises(ConfigError, match=r"took 4 each; set trainer.total_training_steps=31 to train"):
        train(toy.config(tmp_path, epochs))


def test_the_epoch_of_a_step_is_that_of_its_rows(toy: Toy, tmp_path: Path) -> None:
    _, rows = train(toy.config(tmp_path, {"data.train_batch_size": 16, "trainer.total_training_steps": 3}))
    assert [row["training/epoch"] for row in rows if "training/epoch" in row] == [0, 0, 1]


def test_a_checkpoint_says_where_the_driver_stood(toy: Toy, tmp_path: Path) -> None:
    train(toy.config(tmp_path, {"trainer.save_freq": 2}))
    state = json.loads((tmp_path / "global_step_2" / "trainer.json").read_text())
    assert state["step"] == 2
    assert state["num_drawn"] == 8
    assert state["metrics"]["training/global_step"] == 2
    # The last step is saved too, whatever the frequency.
    assert (tmp_path / "global_step_3" / "manifest.json").exists()


def test_val_only_validates_the_checkpoint_and_takes_nothing_away(toy: Toy, tmp_path: Path) -> None:
    keys = {"data.val_files": str(toy.data / "val.parquet"), "trainer.test_freq": 1, "trainer.save_freq": 1}
    _, rows = train(toy.config(tmp_path / "run", keys))
    expected = {name: value for name, value in rows[1].items() if name.startswith("val-")}
    first = {
        "trainer.val_only": True,
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(tmp_path / "run" / "global_step_2"),
    }
    result, found = train(toy.config(tmp_path / "run", {**keys, **first}))
    assert result.validation == expected
    row = {"step": 2, **expected, "timing_s/testing": ANY}
    assert found == [*rows, row]
    # In another run folder, and without naming training prompts, which nobody asks for.
    result, found = train(toy.config(tmp_path / "other", {**keys, **first, "data.train_files": []}))
    assert (result.steps, found) == (2, [row])
