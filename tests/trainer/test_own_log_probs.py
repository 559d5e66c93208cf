"""The pass for old log-probs leaves out the first mini-batch where nothing reads them before the update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.observability.run_folder import read_json_lines
from dovetail.protocol import DataProto
from dovetail.trainer.own_log_probs import first_mini_batch, score_others
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.workers.actor import DataParallelPPOActor
from tests.trainer.toy_run import DAPO, Toy, repeatable, train
from tests.workers.tiny_run import rollout_batch

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
# A key that makes the pass score all rows, and changes nothing else.
ALL_ROWS = {f"{ACTOR}.calculate_sum_pi_squared": True}
OF_THE_PASS = {"logprob_gap", "token_logprob_gaps", "token_entropies"}


def num_scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass for old log-probs from now on."""
    numbers: list[int] = []
    score = DataParallelPPOActor.score_responses

    def counted(self: DataParallelPPOActor, data: DataProto, **asked: Any) -> Any:
        if asked["entropy"]:  # the reference's pass does not ask for it
            numbers.append(len(data))
        return score(self, data, **asked)

    monkeypatch.setattr(DataParallelPPOActor, "score_responses", counted)
    return numbers


def responses(run: Path, step: int) -> list[dict[str, Any]]:
    """By prompt, and of each in the order in which they were sampled: mini-batches are whole groups."""
    return sorted(read_json_lines(run / "rollouts" / f"step_{step}.jsonl"), key=lambda row: row["uid"])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("keys", "num_left_out"),
    [
        ({}, 8),
        ({"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 1, f"{ACTOR}.use_kl_loss": True}, 8),
        ({f"{ACTOR}.ppo_mini_batch_size": 1, **DAPO}, 4),
    ],
    ids=["grpo", "with critic and reference", "dynamic sampling, four mini-batches"],
)
def test_a_run_that_leaves_rows_out_reports_what_one_that_scores_all_does(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], num_left_out: int
) -> None:
    scored = num_scored(monkeypatch)
    found = repeatable(train(toy.config(tmp_path / "found", keys))[1])
    assert scored == [16 - num_left_out] * 3
    expected = repeatable(train(toy.config(tmp_path / "expected", keys | ALL_ROWS))[1])
    assert scored[3:] == [16] * 3
    for step, (row, full) in enumerate(zip(found, expected, strict=True), start=1):
        assert row.keys() == full.keys()
        assert {"rollout_corr/kl", "rollout_corr/pearson", "rollout_corr/log_ppl_diff_max"} <= row.keys()
        entropy, _ = row.pop("actor/entropy"), full.pop("actor/entropy")
        # The pass and the update cut the first mini-batch differently: float32 rounding, of which Pearson's
        # correlation of nearly equal numbers and a mean difference near 0 see the absolute size.
        assert row == pytest.approx(full, rel=1e-4, abs=1e-5)
        pairs = list(zip(responses(tmp_path / "found", step), responses(tmp_path / "expected", step), strict=True))
        entropies = []
        for response, other in pairs:
            assert other.keys() >= OF_THE_PASS
            assert response.keys() >= other.keys() - OF_THE_PASS
            assert response["response"] == other["response"]
            if "token_entropies" in response:
                entropies += other["token_entropies"]
                assert response["token_logprob_gaps"] == pytest.approx(other["token_logprob_gaps"], abs=1e-5)
            else:
                assert "token_logprob_gaps" not in response
                assert response["logprob_gap"] is None
        assert sum("token_entropies" not in response for response, _ in pairs) == num_left_out
        assert entropy == pytest.approx(float(np.mean(entropies)), abs=1e-4)
        file = tmp_path / "found" / "rollouts" / f"step_{step}.jsonl"
        assert ["token_entropies" in row for row in read_json_lines(file)] == [True] * (16 - num_left_out) + [
            False
        ] * num_left_out
        assert "NaN" not in file.read_text()
    assert "NaN" not in (tmp_path / "found" / "metrics.jsonl").read_text()


@pytest.mark.unit
def test_the_first_mini_batch_is_every_ranks_first_rows_and_comes_back_to_them() -> None:
    batch, seen = rollout_batch(8), []

    def score(rows: DataProto) -> DataProto:
        seen.append(rows.tensors["responses"])
        return DataProto.from_dict({"old_log_probs": -rows.tensors["noise"], "entropys": rows.tensors["noise"]})

    first = first_mini_batch(8, num_ranks=2, mini_batch_rows=4)
    assert first.tolist() == [True, True, False, False] * 2
    partial = score_others(batch, first, score)
    assert torch.equal(seen[0], batch.tensors["responses"][~first])
    for name in ("old_log_probs", "entropys"):
        assert torch.equal(partial.columns.tensors[name].isnan().all(dim=1), first)
    update = DataProto.from_dict({"old_log_probs": -batch.tensors["noise"][first]})
    assert torch.equal(partial.completed(update).tensors["old_log_probs"], -batch.tensors["noise"])


@pytest.mark.unit
@pytest.mark.parametrize(
    ("groups", "ranks", "keys", "num_scored"),
    [
        ([4, 4, 4, 4], 1, {}, 8),
        ([4, 4, 4, 4], 2, {}, 8),
        ([5, 3, 4, 4], 1, {}, 8),  # a mini-batch is two groups: 8 rows each
        ([5, 4, 4, 3], 1, {}, 16),
        ([4, 4, 4, 4], 3, {}, 16),
        ([4, 4], 1, {}, 8),  # a single mini-batch
        ([4, 4, 4, 4], 1, ALL_ROWS, 16),
    ],
)
def test_rows_that_are_laid_out_anew_for_the_update_are_all_scored(
    toy: Toy, tmp_path: Path, groups: list[int], ranks: int, keys: dict[str, Any], num_scored: int
) -> None:
    """Mini-batches that are padded, or a step that is one mini-batch after all."""
    batch, seen = rollout_batch(sum(groups)), []
    uids = np.repeat([str(number) for number in range(len(groups))], groups).astype(object)
    batch = batch.union(DataProto.from_dict({}, {"uid": uids}))

    def compute_log_prob(rows: DataProto) -> DataProto:
        seen.append(len(rows))
        zeros = torch.zeros(rows.tensors["responses"].shape)
        return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros})

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config, trainer.stream = toy.config(tmp_path, keys), None
    group: Any = SimpleNamespace(dp_size=lambda role: ranks, compute_log_prob=compute_log_prob)
    vars(trainer).update(_groups=SimpleNamespace(actor_rollout=group), utilisation=SimpleNamespace())
    scored, partial = trainer._add_old_log_probs(batch, list(range(len(batch))), {})
    assert seen == [num_scored]
    assert (partial is None) == ("old_log_probs" in scored) == (num_scored == len(batch))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("keys", "skips"),
    [
        ({}, True),
        ({f"{ACTOR}.use_kl_loss": True}, True),
        ({f"{ACTOR}.strategy": "megatron"}, True),
        ({f"{ACTOR}.policy_loss.loss_mode": "clip_cov"}, True),
        ({"async_training.mode": "fully_async", "async_training.max_staleness": 0}, True),
        # Nothing is scored at all.
        ({f"{ACTOR}.ppo_mini_batch_size": 4}, False),
        ({f"{CORRECTION}.bypass_mode": True}, False),
        ({"async_training.mode": "fully_async", "async_training.prox": "loglinear"}, False),
        # Something reads it before the update.
        ({"algorithm.use_kl_in_reward": True}, False),
        ({f"{CORRECTION}.rollout_is": "token"}, False),
        ({f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "0.5_2"}, False),
        (ALL_ROWS, False),
        ({"algorithm.adv_estimator": "optimal_token_baseline"}, False),
        ({"algorithm.adv_estimator": "mine", "trainer.import_modules": ["mine"]}, False),
        ({f"{ACTOR}.policy_loss.loss_mode": "mine", "trainer.import_modules": ["mine"]}, False),
        ({"trainer.method": "distill", "distill.kl": "sampled"}, False),
        # The first optimizer step takes other rows, or its rows come again, or there is none.
        ({f"{ACTOR}.shuffle": True}, False),
        ({"algorithm.use_pf_ppo": True}, False),
        ({f"{ACTOR}.ppo_epochs": 2}, False),
        ({"trainer.critic_warmup": 1, "algorithm.adv_estimator": "gae"}, False),
        # The weights of the pass are not those that generated.
        ({"async_training.mode": "fully_async", "async_training.prox": "recompute"}, False),
        # The first stage answers, and has no log-probs in an update.
        ({f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}, False),
    ],
)
def test_the_first_mini_batch_is_left_out_where_its_update_says_the_same(
    toy: Toy, tmp_path: Path, keys: dict[str, Any], skips: bool
) -> None:
    config = toy.config(tmp_path, {f"{CORRECTION}.bypass_mode": False, **keys})
    assert config.skips_first_mini_batch is skips
    assert config.has_log_prob_pass or not skips
