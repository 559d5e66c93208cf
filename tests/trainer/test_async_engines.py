"""Asynchronous runs with engines in processes of their own, on Ray; weights arrive while the engines generate."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.observability.run_folder import RunFolder, read_json_lines
from dovetail.trainer.ppo import RayPPOTrainer, Rollout
from dovetail.trainer.run import run_training
from tests.trainer.test_async_runs import FRESH, checked_ledger, same_run, weights
from tests.trainer.test_resume import answers
from tests.trainer.toy_run import make_toy, train

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.distributed, pytest.mark.timeout(900)),
    *(pytest.mark.xdist_group("trainer-ray"), pytest.mark.usefixtures("ray_here")),
]

R = "actor_rollout_ref.rollout"
APART = {
    "actor_rollout_ref.hybrid_engine": False,
    f"{R}.nnodes": 1,
    f"{R}.n_gpus_per_node": 1,
    "trainer.total_training_steps": 4,
    "trainer.save_freq": 4,
}
ONE_STEP_OFF = {**APART, "async_training.mode": "one_step_off"}
SLOW_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.05 * (extra_info["index"] % 3))  # how long a score takes must change nothing
    return sum(ord(letter) < 128 for letter in solution_str) / max(len(solution_str), 1)
"""


def run(folder: Path, changes: Mapping[str, Any]) -> Path:
    return train(make_toy(folder).config(folder / "run", changes), use_ray=True)[0].folder


@pytest.mark.slow
def test_nothing_stale_is_the_synchronous_run_bit_for_bit(tmp_path: Path) -> None:
    """Two runs on Ray: what the one in this process shows (`test_async_runs`) holds when groups and weights travel."""
    sync, fresh = run(tmp_path / "sync", APART), run(tmp_path / "async", {**APART, **FRESH})
    assert same_run(RunFolder(fresh).read_metrics()) == same_run(RunFolder(sync).read_metrics())
    assert answers(fresh) == answers(sync)
    assert weights(fresh) == weights(sync) != {}
    checked_ledger(fresh, bound=0)


def test_one_step_off_is_a_function_of_the_seed_whatever_takes_how_long(tmp_path: Path) -> None:
    """Two runs on Ray, because only engines of their own run beside the training."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    plain = run(tmp_path / "plain", ONE_STEP_OFF)
    delayed = run(tmp_path / "delayed", {**ONE_STEP_OFF, "custom_reward_function.path": str(tmp_path / "slow.py")})
    rows = RunFolder(plain).read_metrics()
    assert same_run(RunFolder(delayed).read_metrics()) == same_run(rows)
    assert weights(delayed) == weights(plain) != {}
    # Batch k is generated under the weights of step k-2; the first two under those of the start.
    assert [row["async/staleness/mean"] for row in rows] == [0, 1, 1, 1]
    timeline = list(read_json_lines(plain / "timeline.jsonl"))
    assert {span[1] for line in timeline for span in line["spans"] if span[0] == "engine 0"} == {
        "generate_groups", "commit_weights"
    }  # fmt: skip
    waits = [sum(span[:2] == ["driver", "gen"] for span in line["spans"]) for line in timeline if line["step"]]
    assert waits == [2] * 4, "before an update, too, the trainer waits for groups and not for weights"
    ledger = checked_ledger(plain, bound=1)
    assert {tuple(version for version, _ in record.finishes[0]) for record in ledger.draws.values()} == {
        (0,), (1,), (2,)
    }  # fmt: skip


@pytest.mark.slow
def test_fully_async_keeps_its_bound_and_loses_no_draw(tmp_path: Path) -> None:
    changes = {
        **APART,
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 2,
        f"{R}.max_num_seqs": 6,
        f"{R}.n_gpus_per_node": 2,
        "data.max_response_length": 48,
        "trainer.total_training_steps": 6,
    }
    folder = run(tmp_path, changes)
    ledger = checked_ledger(folder, bound=2)
    assert ledger.counts() == {"trained": 24}
    rows = RunFolder(folder).read_metrics()
    assert all(row["async/weight_sync_s"] > row["async/generation_held_s"] > 0 for row in rows)


class KillsAnEngine(RayPPOTrainer):
    """Once, while step 2 trains and the engine generates for the next ones."""

    def learn(self, rollout: Rollout) -> Any:
        if self.global_step == 2:
            engines = self.groups.engines
            assert engines is not None
            group: Any = engines.group
            os.kill(group.identities[0].pid, signal.SIGKILL)
        return super().learn(rollout)


def test_responses_of_a_killed_engine_go_on_from_the_tokens_seen(tmp_path: Path) -> None:
    """A run on Ray: a real process is killed while it generates, and no draw is lost or trained on twice."""
    changes = {
        **APART,
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 2,
        f"{R}.max_num_seqs": 6,
        f"{R}.restart_engine": 1,
        "data.max_response_length": 48,
    }
    folder = tmp_path / "run"
    run_training(make_toy(tmp_path).config(folder, changes), trainer_class=KillsAnEngine, use_ray=True)
    assert checked_ledger(folder, bound=2).counts() == {"trained": 16}
    assert [event["kind"] for event in RunFolder(folder).read_events() if event["kind"] == "engine_restart"]
