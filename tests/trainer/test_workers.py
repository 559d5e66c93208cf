"""The number of workers changes nothing: same answers, same metrics, checkpoints that any number of them loads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli.main import main
from dovetail.controller.reaper import tagged_processes
from dovetail.observability.run_folder import RunFolder
from dovetail.trainer import main_ppo
from dovetail.trainer.groups import create_groups
from tests.programs import run_program
from tests.ray_workers import quick_workers
from tests.trainer.test_faults import all_end, running
from tests.trainer.toy_run import Toy, repeatable, train, train_apart
from tests.workers.tiny_run import rollout_batch

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.distributed, pytest.mark.timeout(900)),
    pytest.mark.xdist_group("trainer-ray"),
]

TOLERANCE = 1e-4
"""float32 sums in another order. Adam's eps of 1e-3 keeps it that small: with 1e-8, entries whose gradient is pure
rounding noise would get full-size steps."""
STEPS = 6
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
KEYS: dict[str, Any] = {
    "actor_rollout_ref.actor.optim.eps": 1e-3,
    "critic.optim.eps": 1e-3,
    "critic.ppo_mini_batch_size": 1,  # other mini-batches than the actor's: they must not depend on ranks either
    "algorithm.adv_estimator": "gae",
    "algorithm.use_pf_ppo": True,  # rows drawn again by score: the same rows on any number of ranks
    "algorithm.use_kl_in_reward": True,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 1,
}
# Tokens of each rank, and a gap between two log-probs that are the same but for rounding.
PER_RANK = ("global_seqlen/",)


@pytest.fixture(scope="module")
def one_worker(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one process, without Ray."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(toy.config(folder, KEYS))
    return folder


def answers(folder: Path, step: int) -> dict[str, list[list[int]]]:
    """Responses by group; ranks take rows in another order."""
    found: dict[str, list[list[int]]] = {}
    for line in (folder / "rollouts" / f"step_{step}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["uid"], []).append(row["response_ids"])
    return {uid: sorted(responses) for uid, responses in found.items()}


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(repeatable(found), repeatable(expected), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.startswith(PER_RANK):
                assert ours[name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), (theirs["step"], name)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_workers")
    return train_apart(folder, {**KEYS, "trainer.n_gpus_per_node": 2, "trainer.save_freq": -1}, use_ray=True)


@pytest.mark.slow  # the next test shows the same from the third step on
def test_two_workers_give_the_answers_and_metrics_of_one(two_workers: Path, one_worker: Path) -> None:
    for step in range(1, STEPS + 1):
        assert answers(two_workers, step) == answers(one_worker, step)
    assert_close(RunFolder(two_workers).read_metrics(), RunFolder(one_worker).read_metrics())


def test_two_workers_continue_the_checkpoint_of_one(toy: Toy, ray_here: None, tmp_path: Path, one_worker: Path) -> None:
    keys = {
        "trainer.n_gpus_per_node": 2,
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(one_worker / "global_step_2"),
    }
    result, rows = train(toy.config(tmp_path, {**KEYS, **keys}), use_ray=True)
    assert ray.is_initialized(), "a run does not stop the Ray that its process had started"
    assert result.steps == STEPS
    expected = RunFolder(one_worker).read_metrics()
    assert [row["step"] for row in rows] == list(range(2, STEPS + 1))
    assert_close(rows[1:], expected[2:])
    for step in range(3, STEPS + 1):
        assert answers(tmp_path, step) == answers(one_worker, step)

    assert_export_is_the_policy(toy, tmp_path)

    # And one process reads what two have written.
    shutil.rmtree(tmp_path / f"global_step_{STEPS}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{STEPS - 1}\n")
    _, again = train(toy.config(tmp_path, KEYS))
    assert [row["step"] for row in again] == list(range(2, STEPS + 1))
    assert_close(again[-1:], expected[-1:])


def assert_export_is_the_policy(toy: Toy, run: Path) -> None:
    """Plain transformers gives the log-probs of the policy that two processes have saved."""
    assert main(["export", str(run), str(run / "exported")]) == 0
    groups = create_groups(toy.config(run / "unused", KEYS), use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model(STEPS)
    groups.actor_rollout.load_checkpoint(str(run / f"global_step_{STEPS}" / "actor"))
    batch = rollout_batch(2)
    ours = groups.actor_rollout.compute_log_prob(batch).tensors["old_log_probs"]
    model = AutoModelForCausalLM.from_pretrained(run / "exported", dtype=torch.float32).eval()
    columns, width = batch.tensors, ours.shape[1]
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = model(**inputs).logits / batch.meta_info["temperature"]
    theirs = logits.log_softmax(-1)[:, :-1].gather(-1, columns["input_ids"][:, 1:, None]).squeeze(-1)[:, -width:]
    mask = columns["attention_mask"][:, -width:].bool()
    torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def interrupted(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on Ray whose driver is killed when it has saved two steps, asked to end in its fourth, run to its end.

    One story, because each start costs a driver, a Ray and a worker.
    """
    folder = tmp_path_factory.mktemp("interrupted")
    _leave_nothing_behind_when_killed(toy, folder)
    _end_with_a_checkpoint_when_asked_to(toy, folder)
    quick = f"ray_init.runtime_env.py_executable={quick_workers()['py_executable']}"
    program = [sys.executable, main_ppo.__file__, *toy.arguments(folder / "run", KEYS), quick]
    last = run_program(program, env=ENVIRONMENT, cwd=folder)
    assert last.returncode == 0, last.stdout[-3000:]
    return folder / "run"


def _leave_nothing_behind_when_killed(toy: Toy, folder: Path) -> None:
    with running(toy, folder, KEYS) as run:
        run.wait_for((run.folder / "global_step_2").exists)
        tag = run.tag
        assert len(tagged_processes(tag)) > 4, "a raylet, its agents and a worker at least"
        run.process.kill()
        assert run.process.wait() == -signal.SIGKILL
        all_end(tag)
    assert len(RunFolder(run.folder).read_metrics()) < STEPS


def _end_with_a_checkpoint_when_asked_to(toy: Toy, folder: Path) -> None:
    with running(toy, folder, KEYS | {"trainer.save_freq": -1}) as run:
        run.wait_for(lambda: run.is_in("gen", from_step=4))
        run.process.send_signal(signal.SIGTERM)
        code, text = run.ends()
    assert code == 128 + signal.SIGTERM, text
    assert "Traceback" not in text
    assert "*** SIGTERM" not in text, "no stack of Ray's C++ code"
    latest = CheckpointStore(run.folder).latest()
    assert latest is not None
    step = int(latest.name.removeprefix("global_step_"))
    assert 2 < step < STEPS, "saved because it was asked to end"
    assert f"SIGTERM: stopped after step {step}; its checkpoint is {latest}. Go on with:" in text
    assert f"trainer.default_local_dir={run.folder}" in text, "the line that resumes"
    (event,) = run.events("stopped")
    assert (event["step"], event["signal"]) == (step, "SIGTERM")


@pytest.mark.slow  # killed runs resume exactly in test_resume, killed and stopped workers end theirs in test_faults
def test_a_run_killed_and_asked_to_end_on_ray_ends_as_the_run_without_ray(interrupted: Path, one_worker: Path) -> None:
    assert repeatable(RunFolder(interrupted).read_metrics()) == repeatable(RunFolder(one_worker).read_metrics())
