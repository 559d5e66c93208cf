"""Engines on devices of their own: the same run as with shared ones, also when an engine is killed in mid-batch."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dovetail.controller.errors import WorkerError, describe_exception
from dovetail.observability.run_folder import RunFolder, read_json_lines
from dovetail.protocol import DataProto
from dovetail.rollout.base import EngineDiedError
from dovetail.trainer.engines import SeparateEngines
from dovetail.trainer.groups import RoleGroups, create_groups
from dovetail.workers.weight_check import SentWeights
from dovetail.workers.weight_sending import SendResult
from tests.trainer.test_workers import answers, assert_close
from tests.trainer.toy_run import Toy, train
from tests.waiting import on_thread, wait_until, wait_until_it_works
from tests.workers.tiny_run import rollout_batch, run_config, small_model, with_old_log_probs

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.distributed, pytest.mark.timeout(900)),
    pytest.mark.xdist_group("trainer-ray"),
]

R = "actor_rollout_ref.rollout"
STEPS = 3
KEYS = {"actor_rollout_ref.actor.optim.eps": 1e-3, "trainer.total_training_steps": STEPS, f"{R}.verify_weights": True}
SPLIT = {"actor_rollout_ref.hybrid_engine": False, f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": 2}
LONG = 400


@pytest.fixture(scope="module")
def separate(toy: Toy, ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = toy.config(tmp_path_factory.mktemp("separate"), {**KEYS, **SPLIT})
    return train(config, use_ray=True)[0].folder


def test_a_run_on_separate_engines_is_the_run_on_shared_ones(toy: Toy, tmp_path: Path, separate: Path) -> None:
    _, shared = train(toy.config(tmp_path, KEYS))
    for step in range(1, STEPS + 1):
        assert answers(separate, step) == answers(tmp_path, step)
    assert_close(RunFolder(separate).read_metrics(), shared)


def test_the_timeline_has_what_separate_engines_did(separate: Path) -> None:
    lines = {line["step"]: line["spans"] for line in read_json_lines(separate / "timeline.jsonl")}
    assert list(lines) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert {("engine 0", "generate_groups"), ("engine 1", "generate_groups")} <= {
            (row, what) for row, what, *_ in lines[step]
        }
    given = [row for row, what, *_ in lines[STEPS] if what == "commit_weights"]
    assert sorted(given) == ["engine 0", "engine 1"]


@pytest.fixture
def groups(ray_here: None, tmp_path: Path) -> Iterator[RoleGroups]:
    """Two processes that train, two that generate."""
    model = small_model(tmp_path, "llama", max_position_embeddings=512)
    config = run_config(
        model,
        {
            **SPLIT,
            "trainer.n_gpus_per_node": 2,
            "data.max_response_length": LONG,
            "algorithm.adv_estimator": "grpo",
            f"{R}.ignore_eos": True,
            f"{R}.restart_engine": 2,
        },
    )
    built = create_groups(config, use_ray=True, use_gpu=False)
    built.init_policy(4)
    yield built
    built.shutdown()


@pytest.fixture
def engines(groups: RoleGroups) -> SeparateEngines:
    assert groups.engines is not None
    return groups.engines


def prompts(n: int = 2) -> DataProto:
    ids = np.empty(4, dtype=object)
    ids[:] = [[5, 9, 11], [6, 7], [8, 9, 10, 12], [20]]
    return DataProto.from_dict(
        {"index": torch.arange(4)}, {"raw_prompt_ids": ids, "sampling_seed": np.arange(4)}, {"n": n}
    )


def kill(engines: SeparateEngines) -> int:
    """End the second engine while it writes."""
    group: Any = engines.group
    pid = group.identities[1].pid
    wait_until_it_works(pid)
    os.kill(pid, signal.SIGKILL)
    return pid


class Started:
    """A group of one engine whose own server dies in a call of `dies_in`, if any. Says who was asked for what."""

    world_size = 1

    def __init__(self, calls: list[Any], *, dies_in: str = "") -> None:
        self._calls = calls
        self._dies_in = dies_in

    def __getattr__(self, method: str) -> Any:
        return Call(method, self)

    def answer(self, method: str, *args: Any) -> Any:
        self._calls.append((method, *args))
        if method == self._dies_in:
            error = describe_exception(EngineDiedError("the server is gone"), "rollout", 0, method, pid=1, node="here")
            raise pickle.loads(pickle.dumps(error))  # as it arrives from another process
        answers = {
            "num_weight_ranks": [2, 3],
            "receive_weights": [0.1],
            "open_weight_group": ["address", None],
            "connect_weight_group": [SendResult()],
            "send_weights": [SendResult(sent=cast("SentWeights", "sums")), SendResult()],
        }
        return answers.get(method)


class Call:
    def __init__(self, method: str, group: Started) -> None:
        self._method, self._group = method, group

    def __call__(self, *args: Any) -> Any:
        return self._group.answer(self._method, *args)

    def submit(self, *args: Any, **options: Any) -> Any:
        return SimpleNamespace(get=lambda: self(*args))


@pytest.mark.parametrize("restarts", [1, 0])
def test_an_engine_whose_own_servers_died_is_replaced_like_a_dead_worker(
    toy: Toy, tmp_path: Path, restarts: int
) -> None:
    calls: list[Any] = []
    config = toy.config(tmp_path, {f"{R}.restart_engine": restarts, f"{R}.verify_start": False})
    waiting = [Started(calls, dies_in="generate_sequences"), Started(calls)]
    trainer: Any = Started([])
    engines = SeparateEngines(config, trainer, lambda: cast("Any", waiting.pop(0)))
    engines.init_model()
    assert calls == [
        ("init_model",),
        ("mesh_layout", "rollout"),
        ("num_weight_ranks",),
        ("join_weight_group", "address", [2, 3]),
        ("receive_weights", 0),
    ]
    assert trainer._calls[0] == ("open_weight_group", 5, "127.0.0.1")
    if restarts:
        engines.generate_sequences(cast("Any", "prompts"))
        assert [call[0] for call in calls[5:]] == [
            "generate_sequences",
            "shutdown",
            *(call[0] for call in calls[:5]),
            "generate_sequences",
        ]
        assert engines.num_restarts == 1
    else:
        with pytest.raises(WorkerError, match="generate_sequences failed"):
            engines.generate_sequences(cast("Any", "prompts"))


def test_an_engine_that_dies_between_two_steps_is_ready_before_it_is_used_again(toy: Toy, tmp_path: Path) -> None:
    calls: list[Any] = []
    config = toy.config(tmp_path, {f"{R}.restart_engine": 1, f"{R}.verify_start": False})
    waiting = [Started(calls, dies_in="freeze_gc"), Started(calls)]
    engines = SeparateEngines(config, cast("Any", Started([])), lambda: cast("Any", waiting.pop(0)))
    engines.init_model()
    begun = [call[0] for call in calls]
    engines.freeze_gc()
    assert [call[0] for call in calls[len(begun) :]] == ["freeze_gc", "shutdown", *begun, "freeze_gc"]


def test_weights_follow_every_update_and_a_killed_engine_is_started_again_as_often_as_allowed(
    groups: RoleGroups, engines: SeparateEngines
) -> None:
    """One story, because the two processes that train and the two that generate cost half a minute to start."""
    _follow_an_update(groups, engines)
    _train_beside_a_dead_engine(groups, engines)
    _survive_a_kill(engines)
    _say_who_died(groups, engines)


def _follow_an_update(groups: RoleGroups, engines: SeparateEngines) -> None:
    before = engines.generate_sequences(prompts())
    assert set(before.tensors["weight_version"].flatten().tolist()) == {0}
    batch = rollout_batch()
    old = groups.actor_rollout.compute_log_prob(batch).tensors["old_log_probs"]
    groups.actor_rollout.update_actor(with_old_log_probs(batch, old))
    groups.weights_changed(1)
    after = engines.generate_sequences(prompts())
    assert set(after.tensors["weight_version"].flatten().tolist()) == {1}
    log_probs = groups.actor_rollout.compute_log_prob(after).tensors["old_log_probs"]
    assert (log_probs - after.tensors["rollout_log_probs"]).abs().max() < 1e-4
    assert [report.passed for report in engines.check_parity()] == [True, True]


def _train_beside_a_dead_engine(groups: RoleGroups, engines: SeparateEngines) -> None:
    """It is replaced when it is needed; what the trainer computes meanwhile does not need it."""
    expected = engines.generate_sequences(prompts())
    dead: Any = engines.group
    os.kill(dead.identities[1].pid, signal.SIGKILL)
    wait_until(lambda: dead._processes.failure is not None, "the watchdog to notice")
    assert groups.actor_rollout.compute_log_prob(rollout_batch()).tensors["old_log_probs"].isfinite().all()
    again = engines.generate_sequences(prompts())
    assert torch.equal(again.tensors["responses"], expected.tensors["responses"])
    assert engines.num_restarts == 1


def _survive_a_kill(engines: SeparateEngines) -> None:
    expected = engines.generate_sequences(prompts())
    reasons: list[str] = []
    engines.on_restart = reasons.append
    running = on_thread(engines.generate_sequences, prompts())
    pid = kill(engines)
    wait_until(lambda: reasons, "a word of the driver")
    assert f"rollout[rank 1] died (pid {pid}" in reasons[0]
    assert "while running 'generate_sequences'" in reasons[0]
    result = running.result(120)
    for name in ("responses", "response_mask", "weight_version"):
        assert torch.equal(result.tensors[name], expected.tensors[name]), name
    assert engines.num_restarts == 2


def _say_who_died(groups: RoleGroups, engines: SeparateEngines) -> None:
    """No restart is left; the trainer goes on."""
    running = on_thread(engines.generate_sequences, prompts())
    kill(engines)
    assert "rollout[rank 1] died" in str(running.exception(120))
    assert groups.actor_rollout.compute_log_prob(rollout_batch()).tensors["old_log_probs"].isfinite().all()
