"""What a checkpoint holds is what was asked for; a save in the background is one that happened before; a full disk."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

import tests.ranks  # noqa: F401  the fork server has torch and the models imported then
from dovetail.checkpoint.manifest import BrokenCheckpoint, verify_folder
from dovetail.checkpoint.sharded import BACKGROUND_LIMIT_S
from dovetail.controller import WorkerError
from dovetail.trainer.answer_files import AnswerFiles
from dovetail.trainer.groups import RoleGroups, call_limits, create_groups
from tests.trainer.killed_run import run_until_killed
from tests.trainer.toy_run import Toy, repeatable, train
from tests.workers.tiny_run import rollout_batch

pytestmark = pytest.mark.e2e

ACTOR, CRITIC = "actor_rollout_ref.actor.checkpoint", "critic.checkpoint"
PPO: dict[str, Any] = {"algorithm.adv_estimator": "gae", "trainer.save_freq": 1, "trainer.total_training_steps": 4}
BACKGROUND = {f"{ACTOR}.async_save": True, f"{CRITIC}.async_save": True}


@pytest.fixture(scope="module")
def ppo_run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run with a critic that saves everything at every step, before training goes on."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    changes = {**PPO, f"{CRITIC}.save_contents": ["model", "optimizer", "extra", "hf_model"]}
    return folder, train(toy.config(folder, changes))[1]


def fresh_groups(toy: Toy, folder: Path, changes: dict[str, Any]) -> RoleGroups:
    config = toy.config(folder, {**PPO, **changes})
    groups = create_groups(config, use_ray=False, use_gpu=False)
    assert groups.critic is not None
    groups.critic.init_model(4)
    groups.actor_rollout.init_model(4)
    return groups


def log_probs(groups: RoleGroups) -> torch.Tensor:
    return groups.actor_rollout.compute_log_prob(rollout_batch(2)).tensors["old_log_probs"]


# ---- in the background ----


def test_a_run_that_saves_in_the_background_is_the_same_run(
    toy: Toy, tmp_path: Path, ppo_run: tuple[Path, list[dict[str, Any]]]
) -> None:
    saved, rows = ppo_run
    _, found = train(toy.config(tmp_path, {**PPO, **BACKGROUND}))
    assert repeatable(found) == repeatable(rows)
    for step in range(1, 5):
        verify_folder(tmp_path / f"global_step_{step}")
    assert not list(tmp_path.glob(".global_step_*"))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [1, 2, 3, 4]
    ours, theirs = fresh_groups(toy, tmp_path / "a", {}), fresh_groups(toy, tmp_path / "b", {})
    # Step 2 was written while step 3 changed the weights.
    ours.actor_rollout.load_checkpoint(str(tmp_path / "global_step_2" / "actor"))
    theirs.actor_rollout.load_checkpoint(str(saved / "global_step_2" / "actor"))
    assert torch.equal(log_probs(ours), log_probs(theirs))


def test_a_save_in_the_background_may_take_longer_than_earlier_calls_that_found_it_written(
    toy: Toy, tmp_path: Path
) -> None:
    limits = call_limits(toy.config(tmp_path, {"trainer.worker_timeout_s": 60.0}))
    assert limits.limit("actor_rollout_ref", "finish_saving").hung_s > BACKGROUND_LIMIT_S
    limits.record("actor_rollout_ref", "finish_saving", 0.01)
    assert limits.limit("actor_rollout_ref", "finish_saving").hung_s > BACKGROUND_LIMIT_S, (
        "the workers name a save that hangs"
    )


def test_a_run_killed_while_it_saves_in_the_background_continues_the_checkpoint_before(
    toy: Toy, tmp_path: Path, ppo_run: tuple[Path, list[dict[str, Any]]]
) -> None:
    config = toy.config(tmp_path, {**PPO, **BACKGROUND})
    assert run_until_killed(config, "save", 3) == -signal.SIGKILL
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) == 2
    verify_folder(tmp_path / "global_step_2")
    _, rows = train(config)
    assert repeatable(rows) == repeatable(ppo_run[1])
    assert not list(tmp_path.glob(".global_step_*"))


# ---- contents ----


def test_the_last_checkpoint_is_there_whatever_fails_after_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(files: AnswerFiles) -> None:
        raise OSError("the folder of responses is gone")

    monkeypatch.setattr(AnswerFiles, "close", fail)
    keys = {**BACKGROUND, "trainer.total_training_steps": 1, "trainer.save_freq": 1}
    with pytest.raises(OSError, match="responses is gone"):
        train(toy.config(tmp_path / "run", keys))
    verify_folder(tmp_path / "run" / "global_step_1")


def test_only_what_save_contents_names_is_written(toy: Toy, tmp_path: Path) -> None:
    _, rows = train(toy.config(tmp_path, {**PPO, f"{ACTOR}.save_contents": ["model"], "trainer.save_freq": 2}))
    actor, critic = tmp_path / "global_step_2" / "actor", tmp_path / "global_step_2" / "critic"
    assert sorted(path.name for path in actor.iterdir()) == ["part_0.json", "shards", "state.json"]
    assert (critic / "extra.safetensors").exists()
    size, whole = (sum(file.stat().st_size for file in (f / "shards").iterdir()) for f in (actor, critic))
    assert size < 0.5 * whole
    # Continuing loads the weights, starts the optimizer anew, and goes on to the last step.
    chosen = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(actor.parent)}
    result, again = train(toy.config(tmp_path / "again", {**PPO, **chosen}))
    assert result.steps == 4
    third = {row["step"]: row for row in again}[3]
    assert third["critic/score/mean"] == rows[2]["critic/score/mean"]
    assert third["actor/entropy"] == rows[2]["actor/entropy"]
    assert repeatable(again)[-1] != repeatable(rows)[-1]


def test_only_what_load_contents_names_is_read(
    toy: Toy, tmp_path: Path, ppo_run: tuple[Path, list[dict[str, Any]]]
) -> None:
    saved = str(ppo_run[0] / "global_step_4" / "actor")
    everything = fresh_groups(toy, tmp_path, {})
    weights_only = fresh_groups(toy, tmp_path, {f"{ACTOR}.load_contents": ["model"]})
    nothing = fresh_groups(toy, tmp_path, {f"{ACTOR}.load_contents": ["extra"]})
    before = log_probs(nothing)
    for groups in (everything, weights_only, nothing):
        groups.actor_rollout.load_checkpoint(saved)
    assert torch.equal(log_probs(everything), log_probs(weights_only))
    assert torch.equal(log_probs(nothing), before)
    assert not torch.equal(log_probs(everything), before)


def test_a_checkpoint_without_weights_is_refused_with_the_way_out(toy: Toy, tmp_path: Path) -> None:
    keys = {f"{ACTOR}.save_contents": ["hf_model"], "trainer.save_freq": 1, "trainer.total_training_steps": 1}
    train(toy.config(tmp_path, keys))
    assert (tmp_path / "global_step_1" / "actor" / "huggingface" / "model.safetensors").exists()
    with pytest.raises((BrokenCheckpoint, WorkerError), match=r"saved without model.*trainer\.resume_mode=disable"):
        train(toy.config(tmp_path, {**keys, "trainer.total_training_steps": 2}))


def test_the_critic_is_written_as_a_folder_that_transformers_loads(
    toy: Toy, tmp_path: Path, ppo_run: tuple[Path, list[dict[str, Any]]]
) -> None:
    saved = ppo_run[0] / "global_step_4" / "critic"
    groups = fresh_groups(toy, tmp_path, {})
    assert groups.critic is not None
    groups.critic.load_checkpoint(str(saved))
    batch = rollout_batch(2)
    columns = batch.tensors
    ours = groups.critic.compute_values(batch).tensors["values"]
    model = AutoModelForTokenClassification.from_pretrained(saved / "huggingface", dtype=torch.float32).eval()
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        found = model(**inputs).logits.squeeze(-1)
    width = ours.shape[1]
    mask = columns["response_mask"].bool()
    torch.testing.assert_close(ours[mask], found[:, -width - 1 : -1][mask], atol=1e-5, rtol=0)


# ---- a full disk ----


@pytest.mark.slow  # `test_errors` shows it with a disk that says it is full
def test_a_disk_that_is_really_full_is_said_and_the_run_goes_on_when_there_is_space(
    toy: Toy, tmp_path: Path, ppo_run: tuple[Path, list[dict[str, Any]]]
) -> None:
    """A file system in memory, in a namespace of its own, holds one checkpoint and a half."""
    manifest = json.loads((ppo_run[0] / "global_step_1" / "manifest.json").read_text())
    room = int(1.5 * sum(file["size"] for file in manifest["files"].values()))
    disk = tmp_path / "disk"
    disk.mkdir()
    keys = {**PPO, "trainer.total_training_steps": 2}
    program = shlex.join(
        [sys.executable, "-m", "dovetail.cli.main", "train", "--local", *toy.arguments(disk / "run", keys)]
    )
    script = f"""
        mount -t tmpfs -o size={room} tmpfs {disk}
        {program} > {tmp_path}/out.txt 2> {tmp_path}/first.txt; echo $? > {tmp_path}/first_code.txt
        ls -A {disk}/run > {tmp_path}/listed.txt
        mount -o remount,size={4 * room} {disk}
        {program} > {tmp_path}/out.txt 2> {tmp_path}/second.txt; echo $? > {tmp_path}/second_code.txt
        cp {disk}/run/metrics.jsonl {tmp_path}/metrics.jsonl
    """
    apart = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*apart, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine allows no mount namespace; the limit on file sizes is tested elsewhere")
    subprocess.run([*apart, "sh", "-c", script], check=True, timeout=280)
    said = (tmp_path / "first.txt").read_text()
    assert (tmp_path / "first_code.txt").read_text().strip() == "2", said
    assert "Traceback" not in said
    assert f"{disk}/run/global_step_2 could not be written, the disk is full" in said
    assert "are needed and" in said
    assert "are free" in said
    assert "trainer.max_actor_ckpt_to_keep" in said
    assert f"{disk}/run/global_step_1 is complete" in said
    assert [name for name in (tmp_path / "listed.txt").read_text().split() if "global_step" in name] == [
        "global_step_1"
    ]
    assert (tmp_path / "second_code.txt").read_text().strip() == "0", (tmp_path / "second.txt").read_text()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert repeatable(rows) == repeatable(ppo_run[1])[:2]
