"""A worker that trains beside an asynchronous vLLM engine in a Ray actor: the engine is killed in mid-batch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dovetail.controller import WorkerError, start_ray, stop_ray
from dovetail.trainer.groups import RoleGroups, create_groups
from tests.trainer.test_separate_engines import prompts
from tests.workers.tiny_run import rollout_batch, run_config, with_old_log_probs

pytestmark = pytest.mark.engine

R = "actor_rollout_ref.rollout"
LONG = 300


@pytest.fixture(scope="module")
def groups(folders: dict[str, Path]) -> Iterator[RoleGroups]:
    config = run_config(
        folders["llama_tied"],
        {
            "trainer.n_gpus_per_node": 1,
            "trainer.device": "cpu",
            "data.max_response_length": LONG,
            "algorithm.adv_estimator": "grpo",
            f"{R}.name": "vllm",
            f"{R}.mode": "async",
            f"{R}.ignore_eos": True,
            f"{R}.restart_engine": 1,
            f"{R}.max_num_seqs": 16,
            f"{R}.engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 64 << 20}},
        },
    )
    start_ray(num_cpus=4, object_store_memory=256 << 20)
    built = create_groups(config, use_ray=True, use_gpu=False)
    built.init_policy(4)
    yield built
    built.shutdown()
    stop_ray()


def kill_core(groups: RoleGroups) -> float:
    """End vLLM's own process, once it is writing."""
    policy: Any = groups.actor_rollout
    raylet = psutil.Process(policy.identities[0].pid).parent()
    assert raylet is not None
    cores = [child for child in raylet.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    time.sleep(0.7)
    os.kill(cores[-1].pid, signal.SIGKILL)
    return time.monotonic()


def test_the_batch_is_finished_with_the_trained_weights_and_the_driver_hears_of_it(groups: RoleGroups) -> None:
    policy = groups.actor_rollout
    batch = rollout_batch()
    old = policy.compute_log_prob(batch).tensors["old_log_probs"]
    policy.update_actor(with_old_log_probs(batch, old))
    expected = policy.generate_sequences(prompts())
    pending = policy.generate_sequences.submit(prompts())
    kill_core(groups)
    found = pending.get()
    for name in ("responses", "response_mask", "weight_version"):
        assert torch.equal(found.tensors[name], expected.tensors[name]), name
    assert found.meta_info["metrics"]["rollout/engine_restarts"] in (1, [1])
    log_probs = policy.compute_log_prob(found).tensors["old_log_probs"]
    assert (log_probs - found.tensors["rollout_log_probs"]).abs().max() < 1e-4


def test_without_a_restart_left_the_driver_says_so_within_ten_seconds(groups: RoleGroups) -> None:
    pending = groups.actor_rollout.generate_sequences.submit(prompts())
    killed = kill_core(groups)
    with pytest.raises(WorkerError, match=r"actor_rollout_ref\[rank 0\]\.generate_sequences.*engine process died"):
        pending.get()
    assert time.monotonic() - killed < 10
