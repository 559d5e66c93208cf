"""Every estimator trains, with the metrics users plot; every stage finds the columns it reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import main
from dovetail.dashboard.runs import Run
from dovetail.data.files import prompt_row, write_rows
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.protocol.schema import STAGES, unmet_reads, validate_stage
from dovetail.rewards.runner import PendingRewards, RewardResult
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.groups import RoleGroups
from dovetail.trainer.ppo import Metrics, RayPPOTrainer
from dovetail.trainer.run import run_training
from tests.trainer.toy_run import DAPO, Toy, train

pytestmark = pytest.mark.e2e

ESTIMATORS = (
    *("gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo"),
    *("gpg", "max_rl"),
)
SPREADS = ("critic/score", "critic/rewards", "critic/advantages", "critic/returns", "response_length", "prompt_length")
EXPECTED = {
    *("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/grad_norm", "actor/lr"),
    *(f"{name}/{part}" for name in SPREADS for part in ("mean", "max", "min")),
    *("response_length/clip_ratio", "prompt_length/clip_ratio", "actor/entropy", "reward/failed"),
    *("timing_s/gen", "timing_s/reward", "timing_s/old_log_prob", "timing_s/adv", "timing_s/update_actor"),
    *("timing_s/step", "timing_per_token_ms/gen", "timing_per_token_ms/update_actor"),
    *("perf/mfu/actor", "perf/mfu/actor_infer", "perf/mfu/rollout", "perf/peak_tflops"),
    *("perf/throughput", "perf/total_num_tokens", "perf/time_per_step", "perf/cpu_memory_used_gb"),
    *("training/global_step", "training/epoch", "global_seqlen/mean"),
    *("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/training_ppl", "rollout_corr/rollout_ppl"),
}
WITH_CRITIC = {
    *("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"),
    *("critic/values/mean", "critic/vf_explained_var", "timing_s/values", "timing_s/update_critic"),
    *("perf/mfu/critic", "perf/mfu/critic_infer"),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_trains_three_steps(toy: Toy, tmp_path: Path, estimator: str) -> None:
    result, rows = train(toy.config(tmp_path, {"algorithm.adv_estimator": estimator}))
    assert result.steps == 3
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        wrong = {name: value for name, value in row.items() if value is None or not math.isfinite(value)}
        assert not wrong
        assert EXPECTED - set(row) == set()
        assert (WITH_CRITIC - set(row) == set()) == (estimator == "gae")
        assert row["actor/grad_norm"] > 0
        assert row["actor/skipped_steps"] == 0


def test_validation_is_reported_per_data_source(toy: Toy, tmp_path: Path) -> None:
    keys = {
        "data.val_files": str(toy.data / "val.parquet"),
        "custom_reward_function.name": "mostly",
        "actor_rollout_ref.rollout.val_kwargs": {"n": 4, "do_sample": True, "temperature": 1.0},
        "trainer.val_before_train": True,
        "trainer.test_freq": 2,
    }
    result, rows = train(toy.config(tmp_path, keys))
    assert [row["step"] for row in rows if "val-core/toy/acc/mean@4" in row] == [0, 2, 3]
    assert {"val-core/toy/acc/best@4", "val-core/toy/acc/maj@4", "val-aux/toy/reward/mean@4"} <= set(rows[0])
    assert result.validation["val-core/toy/acc/mean@4"] == rows[-1]["val-core/toy/acc/mean@4"]
    assert (tmp_path / "validation" / "step_0.jsonl").exists()


def test_a_run_may_validate_and_stop(toy: Toy, tmp_path: Path) -> None:
    keys = {"data.val_files": str(toy.data / "val.parquet"), "data.val_batch_size": 3, "trainer.val_only": True}
    result, rows = train(toy.config(tmp_path, keys))
    assert result.steps == 0
    assert [row["step"] for row in rows] == [0]
    assert "val-core/toy/reward/mean@1" in result.validation
    answers = (tmp_path / "validation" / "step_0.jsonl").read_text().splitlines()
    assert len(answers) == 4, "all prompts, though 3 go at a time"


def test_a_run_that_has_validated_is_finished_for_the_dashboard_and_the_report(toy: Toy, tmp_path: Path) -> None:
    keys = {"data.val_files": str(toy.data / "val.parquet"), "trainer.val_only": True}
    train(toy.config(tmp_path, keys))
    run = Run("run", tmp_path)
    run.refresh()
    status = run.status()
    assert (status["state"], status["step"], status["total_steps"]) == ("finished", 0, None)
    assert all(finding["rule"] != "stopped" for finding in run.health())
    assert main(["report", str(tmp_path)]) == 0
    assert "finished, step 0" in (tmp_path / "report.html").read_text()


def test_answers_that_were_cut_off_may_leave_the_loss(toy: Toy, tmp_path: Path) -> None:
    """No answer of the toy model ends by itself within 8 tokens, so nothing is left to learn from."""
    keys = {"algorithm.filter_truncated": True, "actor_rollout_ref.rollout.ignore_eos": True}
    _, rows = train(toy.config(tmp_path, keys | {"trainer.total_training_steps": 1}))
    assert rows[0]["response/filtered_truncated_share"] == 1
    assert rows[0]["actor/grad_norm"] == 0


def test_a_source_without_accuracy_takes_it_from_no_other(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "by_source.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'acc': True} if data_source == 'exact' else 0.5\n"
    )
    rows = [
        prompt_row(data_source=name, question=f"say {name}", ground_truth="", ability="toy", extra_info={"index": 0})
        for name in ("exact", "judged")
    ]
    keys = {
        "data.val_files": str(write_rows(rows, tmp_path / "val.parquet")),
        "custom_reward_function.path": str(tmp_path / "by_source.py"),
        "trainer.total_training_steps": 1,
    }
    result, _ = train(toy.config(tmp_path / "run", keys))
    assert {name: value for name, value in result.validation.items() if "response_length" not in name} == {
        "val-aux/failed": 0.0,
        "val-core/exact/acc/mean@1": 1.0,
        "val-aux/exact/reward/mean@1": 1.0,
        "val-core/judged/reward/mean@1": 0.5,
    }


def test_the_critic_learns_alone_during_its_warmup(toy: Toy, tmp_path: Path) -> None:
    keys = {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 2}
    _, rows = train(toy.config(tmp_path, keys))
    assert ["actor/pg_loss" in row for row in rows] == [False, False, True]
    assert all("critic/vf_loss" in row for row in rows)


# ---- columns ----


class StageCheckingTrainer(RayPPOTrainer):
    """Checks the batch against the schema before every stage, and notes the order of the stages."""

    seen: list[str]

    def init_workers(self) -> None:
        super().init_workers()
        found = self.groups
        self._groups = RoleGroups(*(self._watched(group) for group in vars(found).values()))

    def _train_step(self) -> Metrics:
        type(self).seen = ["dataset", "assign_uid"]
        return super()._train_step()

    def _take_rewards(self, batch: DataProto, rewards: PendingRewards | RewardResult, metrics: Metrics) -> DataProto:
        self._check("reward", batch)
        return super()._take_rewards(batch, rewards, metrics)

    def _add_advantages(self, batch: DataProto, metrics: Metrics) -> DataProto:
        in_reward = self.config.algorithm.use_kl_in_reward
        corrected = self.config.algorithm.rollout_correction.rollout_is is not None
        self._check("rollout_correction", batch) if corrected else None
        self._check("apply_kl_penalty" if in_reward else "scores_as_rewards", batch)
        found = super()._add_advantages(batch, metrics)
        self._check("compute_advantage", found)
        return found

    def _check(self, stage: str, batch: DataProto) -> None:
        validate_stage(batch, stage)
        self.seen.append(stage)

    def _watched(self, group: Any) -> Any:
        return None if group is None else _Watched(group, self)


class _Watched:
    """A group whose calls that are stages are checked. Generation reads token ids instead of padded columns."""

    def __init__(self, group: Any, trainer: StageCheckingTrainer) -> None:
        self._group, self._trainer = group, trainer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name == "generate_sequences":
            self._trainer.seen.append(name)
        elif name in STAGES:

            def checked(batch: DataProto) -> Any:
                self._trainer._check(name, batch)
                return method(batch)

            return checked
        return method


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        pytest.param(
            {"actor_rollout_ref.actor.ppo_mini_batch_size": 4},
            ["reward", "scores_as_rewards", "compute_advantage", "update_actor"],
            id="one optimizer step",
        ),
        pytest.param(
            {
                "algorithm.adv_estimator": "gae",
                "algorithm.use_kl_in_reward": True,
                "algorithm.rollout_correction.rollout_is": "token",
            },
            [
                *("compute_log_prob", "compute_ref_log_prob", "compute_values", "reward", "rollout_correction"),
                *("apply_kl_penalty", "compute_advantage", "update_critic", "update_actor"),
            ],
            id="everything",
        ),
        pytest.param(
            {"actor_rollout_ref.actor.use_kl_loss": True, "algorithm.rollout_correction.bypass_mode": True},
            ["compute_ref_log_prob", "reward", "scores_as_rewards", "compute_advantage", "update_actor"],
            id="bypass",
        ),
    ],
)
def test_every_stage_finds_what_it_reads(toy: Toy, tmp_path: Path, changes: dict[str, Any], stages: list[str]) -> None:
    config = toy.config(tmp_path, {**changes, "trainer.total_training_steps": 1})
    run_training(config, use_ray=False, trainer_class=StageCheckingTrainer)
    assert StageCheckingTrainer.seen == ["dataset", "assign_uid", "generate_sequences", *stages]
    assert unmet_reads(StageCheckingTrainer.seen, writes=["rollout_log_probs"]) == []


# ---- speed ----


class CountingTrainer(RayDAPOTrainer):
    """Counts the tokens of every answer an engine has given."""

    written: int

    def _answers(self, prompts: DataProto, *, n: int, **sampling: Any) -> DataProto:
        found = super()._answers(prompts, n=n, **sampling)
        type(self).written += int(found.tensors["response_mask"].sum())
        return found


@pytest.mark.parametrize("changes", [DAPO, {"algorithm.adv_estimator": "remax"}], ids=["dapo", "remax"])
def test_time_per_written_token_counts_answers_that_no_update_sees(
    toy: Toy, tmp_path: Path, changes: dict[str, Any]
) -> None:
    CountingTrainer.written = 0
    config = toy.config(tmp_path, {**changes, "trainer.total_training_steps": 1})
    run_training(config, use_ray=False, trainer_class=CountingTrainer)
    [row] = RunFolder(tmp_path).read_metrics()
    trained_on = 4 * 4 * row["response_length/mean"]
    assert CountingTrainer.written > trained_on
    expected = row["timing_s/gen"] * 1000 / CountingTrainer.written
    assert row["timing_per_token_ms/gen"] == pytest.approx(expected)
