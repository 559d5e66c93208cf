"""A whole training run that generates with real vLLM: every update reaches the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.observability.run_folder import RunFolder
from tests.models.tiny import save_tiny_model
from tests.trainer.test_workers import answers, assert_close
from tests.trainer.toy_run import Toy, save_toy_data, train, train_apart

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("vllm")]


VLLM = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 64 * 2**20}},
    "actor_rollout_ref.rollout.max_num_seqs": 16,
}
KEYS = {
    **VLLM,
    "actor_rollout_ref.actor.optim.lr": 1e-2,
    "actor_rollout_ref.actor.optim.eps": 1e-3,
}


def make_toy(folder: Path) -> Toy:
    return Toy(save_tiny_model("llama_tied", folder / "model"), save_toy_data(folder / "data", count=12))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train(make_toy(folder.parent).config(folder, KEYS))
    return folder


def test_engine_and_trainer_agree_at_every_step_of_a_run(one_process: Path) -> None:
    metrics = RunFolder(one_process).read_metrics()
    assert [row["step"] for row in metrics] == [1, 2, 3]
    # A stale engine would be off by tenths after an update at this rate; float32 kernels differ by rounding.
    assert [row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics] == [True] * 3
    assert all(row["actor/grad_norm"] > 0 for row in metrics)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_processes")
    keys = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2}
    return train_apart(folder, {**KEYS, **keys}, use_ray=True, make=make_toy)


@pytest.mark.slow
def test_two_trainer_processes_that_share_a_tensor_parallel_engine_make_the_same_run(
    two_processes: Path, one_process: Path
) -> None:
    metrics = RunFolder(two_processes).read_metrics()
    for step in (1, 2, 3):
        assert answers(two_processes, step) == answers(one_process, step)
    assert_close(metrics, RunFolder(one_process).read_metrics())
    assert all(row["rollout_corr/probs_diff_max"] < 1e-4 for row in metrics)
