"""A training run on Megatron that generates with real vLLM: the metrics of fsdp2, and an engine that is never stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.observability.run_folder import RunFolder
from tests.rollout_vllm.test_training_run import VLLM, make_toy
from tests.trainer.test_megatron_runs import KEYS, MEGATRON, A, assert_same_run
from tests.trainer.toy_run import train_apart

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    cut = {f"{A}.megatron.tensor_model_parallel_size": 2}
    return train_apart(folder, {**KEYS, **MEGATRON, **VLLM, **cut}, use_ray=True, make=make_toy)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    return train_apart(folder, {**KEYS, **VLLM}, use_ray=True, make=make_toy)


def test_vllm_gets_from_megatron_what_it_gets_from_fsdp2(tensor_parallel: Path, fsdp2: Path) -> None:
    metrics = RunFolder(tensor_parallel).read_metrics()
    assert all(row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics)
    assert_same_run(tensor_parallel, fsdp2)
