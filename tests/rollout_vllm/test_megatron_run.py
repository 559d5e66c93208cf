"""A training run on Megatron that generates with real vLLM: the metrics of fsdp2, and an engine that is never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import save_tiny_model
from tests.trainer.test_megatron_runs import KEYS, MEGATRON, A, assert_same_run
from tests.trainer.toy_run import Toy, save_toy_data, train

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VLLM: dict[str, Any] = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 64 * 2**20}},
    "actor_rollout_ref.rollout.max_num_seqs": 16,
}


def test_vllm_gets_from_megatron_what_it_gets_from_fsdp2(tmp_path: Path) -> None:
    model = save_tiny_model("llama_tied", tmp_path / "model")
    toy = Toy(model, save_toy_data(tmp_path / "data", count=12))
    cut = {f"{A}.megatron.tensor_model_parallel_size": 2}
    _, metrics = train(toy.config(tmp_path / "tp2", {**KEYS, **MEGATRON, **VLLM, **cut}), use_ray=True)
    assert all(row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics)
    train(toy.config(tmp_path / "fsdp2", {**KEYS, **VLLM}), use_ray=True)
    assert_same_run(tmp_path / "tp2", tmp_path / "fsdp2")
