"""What goes wrong is said in one message, before or instead of half a result; the last good checkpoint stays."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.manifest import verify_folder
from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli.main import main
from dovetail.config import ConfigError
from dovetail.config.root import DovetailConfig
from dovetail.dashboard.runs import Run
from dovetail.data.errors import DataError
from dovetail.data.files import write_rows
from dovetail.observability.disk import DiskFullError
from dovetail.observability.run_folder import RunFolder
from dovetail.rewards.errors import RewardError
from dovetail.rollout.native.engine import NativeEngine
from dovetail.trainer.main_ppo import main as main_ppo
from tests.ranks import run_alone
from tests.trainer.toy_run import DAPO, Toy, repeatable, toy_rows, train

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def broken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of inputs that no run can use."""
    folder = tmp_path_factory.mktemp("broken")
    rows = [{("question" if name == "prompt" else name): value for name, value in row.items()} for row in toy_rows(8)]
    write_rows(rows, folder / "columns.parquet")
    write_rows(toy_rows(3), folder / "few.parquet")
    (folder / "empty.jsonl").touch()
    (folder / "game.py").write_text("class Game: ...\n")
    (folder / "weights-only").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "weights-only" / name).symlink_to(toy.model / name)
    return folder


ROWS, REWARD = "data.train_files", "custom_reward_function.path"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no reward file": ({REWARD: "{broken}/missing.py"}, "custom_reward_function.path="),
    "no such function": ({"custom_reward_function.name": "compute_scroe"}, "compute_scroe"),
    "no rule for the source": ({REWARD: "null"}, "toy"),
    "no data file": ({ROWS: "{broken}/missing.parquet"}, "missing.parquet"),
    "no prompt column": ({ROWS: "{broken}/columns.parquet"}, "has no column 'prompt'"),
    "no rows": ({ROWS: "{broken}/empty.jsonl"}, "empty.jsonl"),
    "too few rows": ({ROWS: "{broken}/few.parquet"}, "data.train_batch_size"),
    "no model": ({f"{MODEL}.path": "{broken}/no-model"}, "no-model"),
    "no tokenizer": ({f"{MODEL}.path": "{broken}/weights-only"}, "weights-only has no tokenizer"),
    "a name on the hub": (
        {f"{MODEL}.path": "Qwen/Qwen2.5-0.5B"},
        "`hf download Qwen/Qwen2.5-0.5B` where the hub can be reached",
    ),
    "no tools": (
        {f"{ROLLOUT}.multi_turn.enable": True, f"{ROLLOUT}.multi_turn.function_tool_path": "{broken}/no_tools.py"},
        "no_tools.py; give a Python file",
    ),
    "no loops": (
        {f"{ROLLOUT}.agent.agent_loop_config_path": "{broken}/loops.yaml"},
        "loops.yaml: there is no such file",
    ),
    "no such environment": (
        {f"{ROLLOUT}.agent.environment": "{broken}/game.py:Gmae"},
        "it has no 'Gmae'; it defines Game",
    ),
    "no such field": (
        {f"{MODEL}.override_config.rms_norm_esp": 1e-6},
        "actor_rollout_ref.model.override_config.rms_norm_esp=1e-06 is not a field of Qwen2Config",
    ),
}


def keys_of(mistake: str, broken: Path) -> dict[str, Any]:
    keys = MISTAKES[mistake][0].items()
    return {key: value.format(broken=broken) if isinstance(value, str) else value for key, value in keys}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_exit_with_2_and_a_message_and_leave_no_run_folder(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: Path, mistake: str
) -> None:
    arguments = toy.arguments(tmp_path / "run", keys_of(mistake, broken))
    assert main(["train", "--local", *arguments]) == 2
    shown = capsys.readouterr().err
    assert MISTAKES[mistake][1] in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_the_module_entry_point_reports_mistakes_the_same_way(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo(toy.arguments(tmp_path / "run", {REWARD: str(tmp_path / "missing.py")})) == 2
    shown = capsys.readouterr().err
    assert "custom_reward_function.path=" in shown
    assert "Traceback" not in shown


def test_a_tracker_that_is_not_installed_is_a_message(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "--local", *toy.arguments(tmp_path / "run", {"trainer.logger": ["wandb"]})]) == 2
    shown = capsys.readouterr().err
    assert "trainer.logger=wandb needs the package wandb" in shown
    assert "Traceback" not in shown


def test_errors_keep_their_class_for_callers(toy: Toy, tmp_path: Path, broken: Path) -> None:
    with pytest.raises(RewardError):
        train(toy.config(tmp_path / "run", {"reward_model.reward_kwargs": {"nonsense": 1}}))
    for mistake in ("too few rows", "no data file"):
        with pytest.raises(ConfigError):
            train(toy.config(tmp_path / "run", keys_of(mistake, broken)))


def test_a_prompt_longer_than_the_limit_names_the_row_and_the_way_out(toy: Toy, tmp_path: Path) -> None:
    rows = toy_rows(8)
    rows[5] = toy_rows(1, question="x" * 100)[0]
    keys = {"data.train_files": str(write_rows(rows, tmp_path / "long.parquet"))}
    with pytest.raises(DataError, match=r"long\.parquet row 5.*data\.max_prompt_length") as caught:
        train(toy.config(tmp_path / "run", keys))
    assert "truncation" in str(caught.value) or "filter_overlong_prompts" in str(caught.value)
    _, found = train(toy.config(tmp_path / "run", {**keys, "data.filter_overlong_prompts": True}))
    assert len(found) == 3


@pytest.mark.parametrize("when", ["cluster", "start_processes", "testing"])
def test_a_run_that_fails_before_its_first_step_says_why_in_its_folder(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory")

    keys, said = {
        "cluster": ({}, "before it started processes: CUDA out of memory"),
        "start_processes": ({}, "in phase 'start_processes' of the start, before the first step: CUDA out of memory"),
        "testing": (
            {
                "custom_reward_function.path": reward_file(tmp_path, "1 / 0"),
                "data.val_files": str(toy.data / "val.parquet"),
                "trainer.val_before_train": True,
            },
            "in phase 'testing' of the start, before the first step: 1 of 4 responses could not be scored",
        ),
    }[when]
    if name := {"cluster": "uses_gpu", "start_processes": "_create_groups"}.get(when):
        monkeypatch.setattr(f"dovetail.trainer.run.{name}", out_of_memory)
    with pytest.raises(RuntimeError):
        train(toy.config(tmp_path / "run", keys))
    run = Run("run", tmp_path / "run")
    run.refresh()
    status = run.status()
    assert status["state"] == "stopped"
    assert f"It failed {said}" in status["message"]
    assert not RunFolder(tmp_path / "run").read_events(), "another attempt starts over here"
    (warning,) = [warning for warning in run.health() if warning["rule"] == "stopped"]
    assert said in warning["evidence"]


# ---- rewards ----

NAN_FOR = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    bad = {condition}
    if bad:
        return float("nan")
    share = sum(ord(letter) < 128 for letter in solution_str) / max(len(solution_str), 1)
    return {{"score": share, "acc": share}}
"""


def reward_file(folder: Path, condition: str) -> str:
    file = folder / "sometimes_nan.py"
    file.write_text(NAN_FOR.format(condition=condition))
    return str(file)


@pytest.mark.parametrize("changes", [{}, {"algorithm.adv_estimator": "grpo_passk"}, {"algorithm.adv_estimator": "gae"}])
def test_a_reward_of_nan_masks_its_row_and_the_run_goes_on(toy: Toy, tmp_path: Path, changes: dict[str, Any]) -> None:
    keys = {
        "custom_reward_function.path": reward_file(tmp_path, "solution_str[:1] < '5'"),
        "reward_model.max_failed_share": 0.9,
    }
    result, rows = train(toy.config(tmp_path / "run", {**keys, **changes}))
    assert result.steps == 3
    assert sum(row["reward/failed"] for row in rows) > 0
    for row in rows:
        assert None not in row.values()
        answers = [
            json.loads(line) for line in (tmp_path / f"run/rollouts/step_{row['step']}.jsonl").read_text().splitlines()
        ]
        failed = [answer for answer in answers if answer["reward_failed"]]
        assert len(failed) == row["reward/failed"]
        assert all(not any(answer["token_advantages"]) for answer in failed)
        scores = [answer["score"] for answer in answers if not answer["reward_failed"]]
        assert row["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
    events = [event for event in RunFolder(result.folder).read_events() if event["kind"] == "reward_failed"]
    failed_in = {row["step"]: row["reward/failed"] for row in rows if row["reward/failed"]}
    assert {event["step"]: event["count"] for event in events} == failed_in
    assert all("the reward is nan" in event["first"] for event in events)


def test_rewards_that_are_all_nan_stop_the_run_with_the_first_reason(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"custom_reward_function.path": reward_file(tmp_path, "True")}
    assert main(["train", "--local", *toy.arguments(tmp_path / "run", keys)]) == 2
    shown = capsys.readouterr().err
    # Scoring stops as soon as the share of failures cannot be kept, which may be before the last of them.
    assert re.search(r"[1-9]\d* of 16 responses could not be scored", shown)
    assert "nan" in shown


def test_a_reward_that_raises_shows_the_users_own_traceback(toy: Toy, tmp_path: Path) -> None:
    keys = {"custom_reward_function.path": reward_file(tmp_path, "1 / 0")}
    with pytest.raises(RewardError, match="ZeroDivisionError") as caught:
        train(toy.config(tmp_path / "run", keys))
    assert "sometimes_nan.py" in str(caught.value)


@pytest.mark.parametrize("metric", ["score", "acc"])
def test_failed_rows_give_a_group_no_signal_in_dynamic_sampling(toy: Toy, tmp_path: Path, metric: str) -> None:
    keys = {
        **DAPO,
        "algorithm.filter_groups.metric": metric,
        "custom_reward_function.name": "compute_score",
        "custom_reward_function.path": reward_file(tmp_path, "solution_str[:1] < '5'"),
        "reward_model.max_failed_share": 0.9,
        "trainer.total_training_steps": 2,
    }
    _, rows = train(toy.config(tmp_path / "run", keys))
    assert all(None not in row.values() for row in rows)
    assert sum(row["reward/failed"] for row in rows if "reward/failed" in row) > 0


# ---- a full disk ----


def test_a_full_disk_during_a_save_leaves_the_last_checkpoint_whole_and_resumable(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp

    keys = {"trainer.save_freq": 1, "trainer.total_training_steps": 4}
    _, expected = train(toy.config(tmp_path / "whole", keys))
    run = tmp_path / "run"
    write_data = dcp.FileSystemWriter.write_data

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ".global_step_3." in str(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_data(self, *args, **kwargs)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(DiskFullError, match=r"global_step_3 could not be written, the disk is full: about "):
        train(toy.config(run, keys))
    monkeypatch.undo()
    assert sorted(path.name for path in run.iterdir() if "global_step" in path.name) == [
        "global_step_1",
        "global_step_2",
    ]
    verify_folder(run / "global_step_2")
    assert CheckpointStore(run).latest() == run / "global_step_2"
    assert [row["step"] for row in RunFolder(run).read_metrics()] == [1, 2]
    _, rows = train(toy.config(run, keys))
    assert repeatable(rows) == repeatable(expected)


def test_what_is_only_shown_may_fail_to_be_written_and_hides_no_error(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **now: Any) -> None:
        if now["step"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "write_now", full)
    result, rows = train(toy.config(tmp_path / "run"))
    assert (result.steps, len(rows)) == (3, 3)
    assert "what the run is doing now cannot be written: [Errno 28] No space left" in caplog.text
    monkeypatch.setattr(NativeEngine, "_step", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(toy.config(tmp_path / "other", {"actor_rollout_ref.rollout.verify_start": False}))


def test_a_limit_on_file_sizes_is_a_clear_error_and_nothing_half_written(toy: Toy, tmp_path: Path) -> None:
    """The kernel itself refuses to write more: the error that a full quota gives."""
    run = tmp_path / "run"
    config = toy.config(run, {"trainer.save_freq": 1})
    assert "could not be written" in run_alone(_train_with_small_files, config)
    assert not [path for path in run.iterdir() if "global_step" in path.name]
    _, rows = train(config)
    assert len(rows) == 3


def _train_with_small_files(rank: int, world_size: int, config: DovetailConfig) -> str:
    """In a process of its own: the limit is a process's, and pytest writes files too."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))
    with pytest.raises(OSError, match="could not be written") as caught:
        train(config)
    return str(caught.value)
