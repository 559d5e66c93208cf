"""Whole runs with `rollout.exact`: engine and trainer differ by 0, not by little; what is no part of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.effects import unsupported_in_runs
from tests.trainer.toy_run import Toy, train

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
GAPS = ("rollout_corr/probs_diff_max", "rollout_corr/log_ppl_abs_diff", "rollout_corr/k3_kl")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "changes", [{}, {f"{A}.use_dynamic_bsz": True, f"{A}.ppo_max_token_len_per_gpu": 120, f"{R}.temperature": 0.8}]
)
def test_engine_and_trainer_differ_by_nothing_in_every_step(toy: Toy, tmp_path: Path, changes: dict[str, Any]) -> None:
    _, exact = train(toy.config(tmp_path / "exact", {**changes, f"{R}.exact": True}))
    assert len(exact) == 3
    assert [[row[name] for name in GAPS] for row in exact] == [[0.0] * len(GAPS)] * 3


@pytest.mark.e2e
def test_the_run_learns_what_a_plain_run_learns(toy: Toy, tmp_path: Path) -> None:
    _, exact = train(toy.config(tmp_path / "exact", {f"{R}.exact": True}))
    _, plain = train(toy.config(tmp_path / "plain"))
    assert max(row[GAPS[0]] for row in plain) > 0
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss"):
        assert exact[0][name] == pytest.approx(plain[0][name], rel=1e-3, abs=1e-5), name


@pytest.mark.e2e
def test_logits_in_float32_bring_engine_and_trainer_closer_in_bfloat16(toy: Toy, tmp_path: Path) -> None:
    half = {f"{role}.fsdp_config.mixed_precision.param_dtype": "bfloat16" for role in (A, "actor_rollout_ref.ref")}
    half |= {f"{R}.dtype": "bfloat16", f"{A}.use_kl_loss": True, "trainer.total_training_steps": 1}
    (rounded,), (kept,) = (
        train(toy.config(tmp_path / str(fp32), {**half, f"{R}.fp32_lm_head": fp32}))[1] for fp32 in (False, True)
    )
    assert 0 < kept["rollout_corr/k3_kl"] < rounded["rollout_corr/k3_kl"]
    assert kept["rollout_corr/probs_diff_mean"] < rounded["rollout_corr/probs_diff_mean"]
    assert kept["actor/grad_norm"] == pytest.approx(rounded["actor/grad_norm"], rel=0.1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (f"{R}.name", "vllm", "only name=native"),
        (f"{A}.strategy", "megatron", "use fsdp2"),
        ("actor_rollout_ref.model.lora_rank", 8, "adapters"),
        (f"{A}.fp8_recipe", "rowwise", "fp8 products"),
        (f"{A}.ulysses_sequence_parallel_size", 2, "sequence parallelism"),
        ("actor_rollout_ref.model.use_remove_padding", False, "packed sequences"),
        (f"{R}.logprobs_mode", "processed_logprobs", "under the temperature"),
        (f"{R}.kv_cache_dtype", "fp8", "rounds"),
        (f"{R}.kv_on_update", "keep", "other weights"),
    ],
)
def test_what_is_no_part_of_it_is_refused_by_name(key: str, value: Any, why: str) -> None:
    config = load_config(overrides=[f"{R}.exact=True", f"{key}={value}"]).config
    refused = [str(problem) for problem in unsupported_in_runs(config) if problem.key == f"{R}.exact"]
    assert len(refused) == 1
    assert why in refused[0]


@pytest.mark.unit
def test_a_float32_head_is_refused_for_other_engines_with_what_the_trainer_can_do() -> None:
    config = load_config(overrides=[f"{R}.fp32_lm_head=True", f"{R}.name=vllm"]).config
    refused = [str(problem) for problem in unsupported_in_runs(config) if problem.key == f"{R}.fp32_lm_head"]
    assert len(refused) == 1
    assert "use_fused_kernels=True" in refused[0]
