"""Whole runs of what only whole runs show: columns that an estimator reads arrive, traces are written, Muon steps."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch

from dovetail.config import ConfigError
from dovetail.config.root import DovetailConfig
from dovetail.trainer.run import run_training
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit
from tests.trainer.toy_run import Toy, train
from tests.workers.tiny_run import rollout_batch, run_config, small_model

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
    _, _, squares = actor.score_responses(batch, sum_squares=True)
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
