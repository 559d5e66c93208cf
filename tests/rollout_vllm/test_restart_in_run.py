"""A worker that trains beside a vLLM engine in a Ray actor: the engine is killed in mid-batch."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from dovetail.controller import WorkerError, start_ray, stop_ray
from dovetail.trainer.groups import RoleGroups, create_groups
from tests.models.tiny import save_tiny_model
from tests.ranks import run_alone
from tests.trainer.test_separate_engines import prompts
from tests.waiting import wait_until_it_works
from tests.workers.tiny_run import rollout_batch, run_config, with_old_log_probs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.slow]

R = "actor_rollout_ref.rollout"
LONG = 300
COMPARED = ("responses", "response_mask", "weight_version")


@dataclass(frozen=True)
class Played:
    """What two batches gave, in both of which the engine was killed: with one restart left, and with none."""

    expected: dict[str, Tensor]
    found: dict[str, Tensor]
    restarts: Any
    log_prob_gap: float
    refusal: str


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("played")
    return run_alone(play, folder, timeout=280.0)


def play(rank: int, world_size: int, folder: Path) -> Played:
    config = run_config(
        save_tiny_model("llama_tied", folder),
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
    start_ray(num_cpus=1, object_store_memory=256 << 20)  # for the worker: the engine beside it asks for none
    groups = create_groups(config, use_ray=True, use_gpu=False)
    groups.init_policy(4)
    policy = groups.actor_rollout
    batch = rollout_batch()
    old = policy.compute_log_prob(batch).tensors["old_log_probs"]
    policy.update_actor(with_old_log_probs(batch, old))
    expected = policy.generate_sequences(prompts())
    pending = policy.generate_sequences.submit(prompts())
    kill_engine(groups)
    found = pending.get()
    log_probs = policy.compute_log_prob(found).tensors["old_log_probs"]
    pending = policy.generate_sequences.submit(prompts())
    kill_engine(groups)
    with pytest.raises(WorkerError) as refused:
        pending.get(timeout=60)
    played = Played(
        expected={name: expected.tensors[name] for name in COMPARED},
        found={name: found.tensors[name] for name in COMPARED},
        restarts=found.meta_info["metrics"]["rollout/engine_restarts"],
        log_prob_gap=float((log_probs - found.tensors["rollout_log_probs"]).abs().max()),
        refusal=str(refused.value),
    )
    groups.shutdown()
    stop_ray()
    return played


def kill_engine(groups: RoleGroups) -> None:
    """End the engine's process, once it is writing."""
    policy: Any = groups.actor_rollout
    raylet = psutil.Process(policy.identities[0].pid).parent()
    assert raylet is not None
    engines = [child for child in raylet.children(recursive=True) if "EngineActor" in " ".join(child.cmdline())]
    wait_until_it_works(engines[-1].pid)
    os.kill(engines[-1].pid, signal.SIGKILL)


def test_the_batch_is_finished_with_the_trained_weights_and_the_driver_hears_of_it(played: Played) -> None:
    for name in COMPARED:
        assert torch.equal(played.found[name], played.expected[name]), name
    assert played.restarts in (1, [1])
    assert played.log_prob_gap < 1e-4


def test_without_a_restart_left_the_driver_says_so(played: Played) -> None:
    assert re.search(
        r"actor_rollout_ref\[rank 0\]\.generate_sequences.*process of the vLLM engine died", played.refusal
    )
