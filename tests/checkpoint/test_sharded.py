"""State saved by one number of processes and one sharding is read by others, exactly; a failed save hurts nobody.

Loading is compared to the bit. Steps taken after loading on another number of ranks sum gradients in another order, so
they are compared to 1e-5 in fp32 (see ``tests.backends.test_parity``); on the same number of ranks to the bit.
"""

from __future__ import annotations

import copy
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dovetail.backends.build import build_backend
from dovetail.backends.torch_backend import TorchBackend
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.checkpoint.store import CheckpointStore
from dovetail.models.lora import add_lora
from tests.backends.tiny import (
    FP32,
    OPTIM,
    as_numpy,
    largest_difference,
    tiny_policy,
    train_steps,
)
from tests.ranks import run_alone, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
SETTINGS = OPTIM.model_copy(update={"lr_scheduler_type": "linear", "total_training_steps": 10})
Weights = dict[str, np.ndarray]
SAVED = ("single", "fsdp2", "fsdp")
"""Folder name is the strategy that saved it: one process, or two."""
LOADS = {
    1: [("single", -1, source) for source in SAVED],
    2: [("fsdp2", -1, source) for source in SAVED] + [("fsdp", -1, source) for source in SAVED],
    4: [("fsdp2", -1, "fsdp2"), ("fsdp2", 2, "fsdp"), ("fsdp", 2, "single")],
}
"""By number of processes: strategy, fsdp_size and the folder it reads."""


@dataclass(frozen=True)
class States:
    """What two ranks did, and what others made of the states that one process and they have saved."""

    two: list[dict[str, Any]]
    loaded: dict[tuple[int, str, int, str], tuple[Weights, Weights, Any]]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> States:
    root = tmp_path_factory.mktemp("states")
    run_alone(save_single, root)
    two = run_ranks(on_two_ranks, 2, root)
    by_size = {1: run_alone(load_all, root), 2: two[0]["loads"], 4: run_ranks(load_all, 4, root)[0]}
    return States(two, {(size, *case): by_size[size][case] for size, cases in LOADS.items() for case in cases})


@pytest.fixture(scope="module")
def straight() -> tuple[Weights, Weights]:
    """Weights after 2 and after 4 steps of one process that nobody interrupts."""
    backend = build("single")
    return steps(backend, 2), steps(backend, 2)


@pytest.fixture(scope="module")
def two(states: States) -> list[dict[str, Any]]:
    return states.two


def save_single(rank: int, world_size: int, root: Path) -> None:
    backend = build("single")
    steps(backend, 2)
    backend.save_state(root / "single", extra={"step": 2})


@pytest.mark.parametrize(
    "case",
    [(size, *case) for size, cases in LOADS.items() for case in cases],
    ids=lambda c: f"{c[1]} x{c[0]} (fsdp_size {c[2]}) reads {c[3]}",
)
def test_any_sharding_reads_what_another_wrote(
    case: tuple[int, str, int, str], states: States, two: list[dict[str, Any]], straight: tuple[Weights, Weights]
) -> None:
    at_load, later, extra = states.loaded[case]
    source = straight[0] if case[3] == "single" else two[0]["saved"][case[3]]
    assert largest_difference(at_load, source) == 0.0
    assert largest_difference(later, straight[1]) < TOLERANCE
    assert extra == {"step": 2}


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(strategy: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        straight, resumed, straight_random, resumed_random = rank["resume"][strategy]
        assert largest_difference(straight, resumed) == 0.0
        assert straight_random == resumed_random


def test_random_state_is_each_ranks_own(two: list[dict[str, Any]]) -> None:
    assert two[0]["resume"]["fsdp2"][3] != two[1]["resume"]["fsdp2"][3]


def test_a_save_before_the_first_step_does_not_count_as_one(tmp_path: Path) -> None:
    backend = build("single")
    backend.save_state(tmp_path)
    again = build("single")
    again.load_state(tmp_path)
    fresh = build("single")
    expected = steps(fresh, 2)
    assert largest_difference(steps(backend, 2), expected) == 0.0
    assert largest_difference(steps(again, 2), expected) == 0.0


def test_the_optimizer_goes_on_with_the_settings_of_the_run_that_continues(tmp_path: Path) -> None:
    backend = build("single")
    steps(backend, 2)
    backend.save_state(tmp_path)
    changed = SETTINGS.model_copy(update={"weight_decay": 0.5, "betas": (0.5, 0.6), "eps": 0.01})
    again = build_backend("single", tiny_policy(), fsdp=FP32, optim=changed)
    again.load_state(tmp_path)
    groups = again._require_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.5, 0.6), 0.01)}
    assert largest_difference(as_numpy(again.named_weights()), as_numpy(backend.named_weights())) == 0.0


def test_without_its_schedule_a_run_begins_with_the_rate_of_the_first_step(tmp_path: Path) -> None:
    backend = build("single")
    steps(backend, 2)
    backend.save_state(tmp_path)
    again = build("single")
    again.load_state(tmp_path, contents=("model", "optimizer"))
    assert {group["lr"] for group in again._require_optimizer().param_groups} == {SETTINGS.lr}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.layers.__delitem__(1), r"this run's model has no .*layers\.1\."),
        (lambda model: model.layers.append(copy.deepcopy(model.layers[1])), r"it has no .*layers\.2\."),
        (
            lambda model: setattr(model, "norm", torch.nn.LayerNorm(16, bias=False)),
            r"norm\.weight has shape \(32,\) in it and \(16,\) in this run",
        ),
        (lambda model: add_lora(model, rank=4, alpha=8.0), r"it has no .*\.base_layer\..*lora_rank"),
    ],
    ids=["fewer layers", "more layers", "shape", "adapters"],
)
def test_a_checkpoint_of_another_model_is_refused_and_not_taken_for_damaged(
    change: Callable[[Any], Any], reason: str, tmp_path: Path
) -> None:
    build("single").save_state(tmp_path)
    network = tiny_policy()
    change(network.hf_model.model)
    with pytest.raises(BrokenCheckpoint, match=reason) as refused:
        build_backend("single", network, fsdp=FP32, optim=SETTINGS).load_state(tmp_path)
    assert not refused.value.damaged


def test_a_failing_write_on_one_rank_is_an_error_on_all_and_the_last_good_one_stays(two: list[dict[str, Any]]) -> None:
    for rank in two:
        message, latest, names = rank["full disk"]
        assert "File too large" in message
        assert latest == "global_step_1"
        assert names == ["global_step_1", "latest_checkpointed_iteration.txt"]


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"state.json is not readable"):
        build("single").load_state(tmp_path)
    backend = build("single")
    backend.save_state(tmp_path / "cut")
    shard = next((tmp_path / "cut" / "shards").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(BrokenCheckpoint, match="cut cannot be used"):
        backend.load_state(tmp_path / "cut")


# ---- what runs on every rank ----


def build(strategy: str, fsdp_size: int = -1) -> TorchBackend:
    fsdp = FP32.model_copy(update={"fsdp_size": fsdp_size})
    return build_backend(strategy, tiny_policy(), fsdp=fsdp, optim=SETTINGS)


def steps(backend: TorchBackend, count: int) -> Weights:
    train_steps(backend, count)
    return as_numpy(backend.named_weights())


def load_and_continue(strategy: str, fsdp_size: int, source: str, root: Path) -> tuple[Weights, Weights, Any]:
    backend = build(strategy, fsdp_size)
    extra = backend.load_state(root / source)
    return as_numpy(backend.named_weights()), steps(backend, 2), extra


def load_all(rank: int, world_size: int, root: Path) -> dict[tuple[str, int, str], tuple[Weights, Weights, Any]]:
    return {case: load_and_continue(*case, root) for case in LOADS[world_size]}


def on_two_ranks(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    saved = {strategy: save(strategy, root / strategy) for strategy in ("fsdp2", "fsdp")}
    return {
        "saved": saved,
        "loads": load_all(rank, world_size, root),
        "resume": {strategy: resume(strategy, rank, root / f"resume-{strategy}") for strategy in ("fsdp2", "fsdp")},
        "full disk": full_disk(rank, root / "run"),
    }


def save(strategy: str, folder: Path) -> Weights:
    backend = build(strategy)
    weights = steps(backend, 2)
    backend.save_state(folder, extra={"step": 2})
    return weights


def resume(strategy: str, rank: int, folder: Path) -> tuple[Weights, Weights, list[float], list[float]]:
    backend = build(strategy)
    steps(backend, 3)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    backend.save_state(folder)
    straight, straight_random = steps(backend, 3), random_numbers()
    other = build(strategy)
    steps(other, 1)
    other.load_state(folder)
    return straight, steps(other, 3), straight_random, random_numbers()


def random_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def full_disk(rank: int, root: Path) -> tuple[str, str, list[str]]:
    """Rank 0 plays the driver that owns the store. Rank 1 may not write files above 1000 bytes: a real failure."""
    backend = build("fsdp2")
    steps(backend, 1)
    store = CheckpointStore(root)
    save_through(store, backend, 1, rank)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    with pytest.raises(OSError, match="could not") as caught:
        save_through(store, backend, 2, rank)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    dist.barrier()
    latest = store.latest()
    assert latest is not None
    return str(caught.value), latest.name, sorted(path.name for path in root.iterdir())


def save_through(store: CheckpointStore, backend: TorchBackend, step: int, rank: int) -> None:
    if rank == 0:
        store.begin(step)
    dist.barrier()
    try:
        backend.save_state(store.root / f".global_step_{step}.partial" / "actor")
    except OSError:
        if rank == 0:
            store.discard(step)
        raise
    if rank == 0:
        store.commit(step, world_size=2)
