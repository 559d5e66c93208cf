"""Whole runs of what only whole runs show: columns of an estimator arrive, traces are written, a network scores."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config import ConfigError
from dovetail.config.root import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.rewards.runner import PendingRewards, RewardResult
from dovetail.trainer.ppo import Metrics, RayPPOTrainer
from dovetail.trainer.run import run_training
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.trainer.toy_run import Toy, train
from tests.workers.tiny_run import FP32, rollout_batch, run_config, save_classifier, small_model

pytestmark = pytest.mark.e2e

ACTOR = "actor_rollout_ref.actor"


def assert_trained(rows: list[dict[str, float]], steps: int) -> None:
    assert [row["training/global_step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["actor/grad_norm"] > 0


def test_the_optimal_baseline_with_dppo_and_muon_and_a_profile_of_one_step(toy: Toy, tmp_path: Path) -> None:
    keys = {
        "algorithm.adv_estimator": "optimal_token_baseline",
        # One optimizer step: without the estimator there would be no pass for old log-probs.
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.policy_loss.loss_mode": "dppo_kl",
        f"{ACTOR}.loss_agg_mode": "token-sum",
        f"{ACTOR}.optim.optimizer": "Muon",
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.min_num_micro_batch": 3,
        "global_profiler.steps": [2],
        "trainer.total_training_steps": 2,
    }
    result, rows = train(toy.config(tmp_path, keys))
    assert_trained(rows, 2)
    traces = list((result.folder / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step_2_rank_0.pt.trace.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    assert any("addmm" in event.get("name", "") or "mm" in event.get("name", "") for event in events)


def test_gdpo_reads_the_numbers_that_the_reward_returns(toy: Toy, tmp_path: Path) -> None:
    keys = {
        "algorithm.adv_estimator": "gdpo",
        "algorithm.gdpo_reward_keys": ["score", "share"],
        "algorithm.gdpo_reward_weights": [1.0, 0.5],
        f"{ACTOR}.policy_loss.loss_mode": "dppo_tv",
        "custom_reward_function.path": str(tmp_path / "two_rewards.py"),
        "trainer.total_training_steps": 2,
    }
    (tmp_path / "two_rewards.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    share = sum(ord(letter) < 128 for letter in solution_str) / max(len(solution_str), 1)\n"
        '    return {"score": float(share >= 0.5), "share": share}\n'
    )
    _, rows = train(toy.config(tmp_path / "run", keys))
    assert_trained(rows, 2)


def test_sum_of_squares_is_that_of_the_distribution_on_both_heads(tmp_path: Path) -> None:
    """By hand from transformers' logits; the fused head goes through rows in chunks."""
    from transformers import AutoModelForCausalLM

    folder, batch = small_model(tmp_path, "llama"), rollout_batch(4)
    columns = batch.tensors
    width = columns["responses"].shape[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs).logits / batch.meta_info["temperature"]
    expected = logits.softmax(-1).square().sum(-1)[:, :-1][:, -width:]
    mask = columns["attention_mask"][:, -width:].bool()
    for fused in (False, True):
        squares = _score(run_config(folder, {"actor_rollout_ref.model.use_fused_kernels": fused}), batch)
        torch.testing.assert_close(squares[mask], expected[mask], atol=1e-5, rtol=0)


def _score(config: DovetailConfig, batch: object) -> torch.Tensor:
    policy = config.actor_rollout_ref
    backend = build_policy(
        policy.model, strategy="single", fsdp=policy.actor.fsdp_config, optim=policy.actor.optim,
        device=torch.device("cpu"),
    )  # fmt: skip
    actor = DataParallelPPOActor(policy.actor, backend, mini_batch_rows=4, log_prob_limit=MicroBatchLimit(rows=2))
    squares = actor.score_responses(batch, sum_squares=True).sum_squares
    assert squares is not None
    return squares


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm.adv_estimator": "gdpo"}, "gdpo_reward_keys is empty"),
        ({"algorithm.use_pf_ppo": True}, "set algorithm.adv_estimator=gae"),
        (
            {
                "algorithm.adv_estimator": "optimal_token_baseline",
                "algorithm.rollout_correction.bypass_mode": True,
            },
            "bypass_mode=True skips that pass",
        ),
        ({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.min_num_micro_batch": 9}, "the 8 sequences .*use 8 or less"),
        (
            {f"{ACTOR}.optim.optimizer": "Muon", f"{ACTOR}.strategy": "megatron"},
            "Muon cannot .*use strategy=fsdp2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_process_starts(
    toy: Toy, tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_training(toy.config(tmp_path, keys), use_ray=False)


class KeepingTrainer(RayPPOTrainer):
    """Keeps the scored batches, validation's first."""

    kept: list[DataProto]

    def _start_rewards(self, batch: DataProto, *, shaped: bool = True, started: Any = None) -> PendingRewards:
        pending = super()._start_rewards(batch, shaped=shaped, started=started)
        if not shaped:
            self.kept.append(batch.union(pending.result().columns))
        return pending

    def _take_rewards(self, batch: DataProto, rewards: PendingRewards | RewardResult, metrics: Metrics) -> DataProto:
        found = super()._take_rewards(batch, rewards, metrics)
        self.kept.append(found)
        return found


@torch.no_grad()
def transformers_scores(folder: Path, batch: DataProto) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    columns = batch.tensors
    pairs = zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)
    return [float(model(input_ids=ids[kept][None]).logits) for ids, kept in pairs]


@pytest.mark.parametrize("rule", [False, True], ids=["alone", "beside a rule"])
def test_answers_are_scored_by_the_network_in_training_and_validation(toy: Toy, tmp_path: Path, rule: bool) -> None:
    network = save_classifier(tmp_path / "reward")
    keys: dict[str, Any] = {
        "reward_model.enable": True,
        "reward_model.model.path": str(network),
        "reward_model.model.input_tokenizer": None,  # the network reads the policy's tokens
        "reward_model.model.fsdp_config": FP32,
        "reward_model.reward_kwargs": {"rm_weight": 0.5} if rule else {},
        "data.val_files": str(toy.data / "val.parquet"),
        "trainer.val_before_train": True,
        "trainer.total_training_steps": 1,
    }
    keys |= {} if rule else {"custom_reward_function.path": None}
    KeepingTrainer.kept = []
    result = run_training(toy.config(tmp_path / "run", keys), use_ray=False, trainer_class=KeepingTrainer)
    assert result.steps == 1
    assert [len(batch) for batch in KeepingTrainer.kept] == [4, 16, 4]
    for batch in KeepingTrainer.kept:
        found = batch.tensors["token_level_scores"].sum(dim=1)
        expected = torch.tensor(transformers_scores(network, batch))
        if rule:  # what is left is the share of ASCII characters
            shares = found - 0.5 * expected
            assert ((shares > -1e-4) & (shares < 1 + 1e-4)).all()
            assert shares.max() > 0.1 or len(batch) == 4, "greedy answers of the untrained model hold none"
        else:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "validation" / "step_1.jsonl").read_text().splitlines()]
    written = [row["values"]["reward"] for row in rows]
    assert written == pytest.approx(KeepingTrainer.kept[-1].tensors["token_level_scores"].sum(dim=1).tolist())
    assert result.validation["val-core/toy/reward/mean@1"] == pytest.approx(sum(written) / 4, abs=1e-6)
