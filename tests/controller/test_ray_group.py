"""Four real Ray workers: every dispatch mode, meshes, futures, padding, colocated roles, process groups."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from dovetail.controller import (
    BatchFuture,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    cluster,
    resource_pool,
)
from dovetail.protocol import DataProto, DataProtoFuture
from tests.controller.conftest import Roles
from tests.controller.worker_examples import Calculator, add_rank, batch, column
from tests.waiting import wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("controller")]


def test_every_simple_dispatch_mode(group: RayWorkerGroup) -> None:
    assert group.describe("hi", mark="!") == ["hi!-0/4", "hi!-1/4", "hi!-2/4", "hi!-3/4"]
    assert group.all_to_all([10, 11, 12, 13]) == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert group.all_to_all("same") == [(rank, "same") for rank in range(4)]
    assert group.multiply([1, 2, 3, 4], b=[10, 20, 30, 40]) == [10, 40, 90, 160]
    assert group.total(batch(8)) == [1, 5, 9, 13]
    assert group.only_rank_zero("v") == (0, "v")
    assert group.executed_by_rank_zero([1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    assert column(group.execute_with_func_generator(add_rank, batch(4))) == [0, 101, 202, 303]
    assert group.execute_func_rank_zero(max, 3, 5) == 5
    assert group.wait_a_moment() == [0, 1, 2, 3]
    assert group.execute_all_sync("not_registered") == [0, 1, 2, 3]
    assert group.execute_rank_zero_async("not_registered").get() == 0


def test_a_batch_is_split_padded_and_put_together_again(group: RayWorkerGroup) -> None:
    assert column(group.plus(batch(8), amount=0.5)) == [row + 1.5 for row in range(8)]
    assert column(group.plus(batch(6), amount=1)) == [2, 3, 4, 5, 6, 7]
    assert [rows[-2:] for rows in group.rows_seen()] == [[2, 2]] * 4
    assert column(group.sample_twice(batch(3))) == [0, 0, 1, 1, 2, 2]


def test_mesh_calls_collect_one_rank_of_each_data_parallel_rank(group: RayWorkerGroup) -> None:
    assert group.dp_size("actor") == 2
    assert column(group.mesh_plus(batch(4), other=batch(4))) == [0, 2, 4, 6]
    assert column(group.mesh_plus(batch(3))) == [0, 1, 2]
    assert column(group.mesh_reversed(batch(4))) == [0, 1, 2, 3]
    assert group.mesh_train(batch(4)).meta_info["metrics"] == {"rows": [2, 2]}
    with pytest.raises(ValueError, match="3 rows do not divide by the data-parallel size 2"):
        group.mesh_train(batch(3))
    with pytest.raises(Exception, match=r"has no mesh 'nobody' \(registered: \['actor', 'reversed'\]\)"):
        group.mesh_unknown(batch(4))


def test_a_future_returns_at_once_and_gives_what_the_blocking_call_gives(group: RayWorkerGroup, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    future = group.gated_plus(batch(8), str(gate))
    assert isinstance(future, DataProtoFuture)
    assert not future.done(), "a non-blocking call must not wait for the workers"
    with pytest.raises(TimeoutError, match=r"actor.gated_plus still runs on ranks \[0, 1, 2, 3\]"):
        future.get(timeout=0.1)
    gate.touch()
    assert column(future.get()) == [row + 1 for row in range(8)]
    assert future.done()
    assert column(group.plus.submit(batch(4), 1).get()) == [2, 3, 4, 5]


def test_futures_chain_through_calls_without_reaching_the_driver(group: RayWorkerGroup, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    group.mesh_plus(batch(4))  # the first call on a mesh asks the workers for its layout, and waits its turn for that
    first = group.gated_plus(batch(8), str(gate))
    second = group.plus_later(first, 10)
    third = group.mesh_plus.submit(second)  # four parts become two shares
    assert not first.done()
    gate.touch()
    assert column(third.get()) == [row + 11 for row in range(8)]
    assert isinstance(third, BatchFuture)


def test_uneven_parts_are_shared_out_evenly(group: RayWorkerGroup) -> None:
    future = group.uneven(batch(8))  # rank r makes 2 * (r + 1) rows: 20 in all
    rows_before = [len(rows) for rows in group.rows_seen()]
    result = group.plus(future)
    assert column(result) == [value + 1 for value in column(future.get())]
    assert [rows[-1] for rows in group.rows_seen()] == [5, 5, 5, 5]
    assert [len(rows) for rows in group.rows_seen()] == [count + 1 for count in rows_before]


def test_a_padded_future_and_a_batch_keep_their_rows_side_by_side(group: RayWorkerGroup) -> None:
    future = group.plus_later(batch(3), 0)  # padded on its way in: only get() can drop the padding
    assert not future.lazy
    assert column(group.mesh_plus(batch(3), other=future)) == [0, 2, 4]
    assert column(group.plus(future, 1)) == [2, 3, 4]


def test_a_method_can_take_the_future_itself(group: RayWorkerGroup) -> None:
    result = group.kind_of_argument(group.plus_later(batch(4), 1))
    assert column(result) == [1, 2, 3, 4]
    assert result.meta_info["kind"] == "BatchSlice"


def test_a_future_given_to_all_ranks_arrives_whole(group: RayWorkerGroup) -> None:
    answers = group.all_to_all(group.plus_later(batch(4), 1))
    assert [column(data) for _, data in answers] == [[1, 2, 3, 4]] * 4


def test_ranks_know_their_place_and_get_the_environment(group: RayWorkerGroup) -> None:
    places = group.place()
    assert [place["local_rank"] for place in places] == [0, 1, 2, 3]
    assert {place["local_world_size"] for place in places} == {4}
    assert [place["env"]["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert len({place["port"] for place in places}) == 1
    assert {place["env"]["OMP_NUM_THREADS"] for place in places} == {"1"}
    assert [place["pid"] for place in places] == [identity.pid for identity in group.identities]


def test_log_lines_carry_role_and_rank(group: RayWorkerGroup, capfd: pytest.CaptureFixture[str]) -> None:
    group.log("a word from the workers", rank=3)
    said: list[str] = []

    def heard() -> bool:  # Ray collects log lines when it has time
        said.extend(capfd.readouterr())
        return "a word" in "".join(said)

    wait_until(heard, "a log line of a worker")
    assert "[actor 3/4] dovetail.tests: a word from the workers" in "".join(said)


def test_colocated_roles_share_processes_on_a_pool_that_another_group_uses(roles: Roles, two: RayWorkerGroup) -> None:
    pids = {g.role: [place["pid"] for place in g.place()] for g in (roles["actor"], roles["critic"], two)}
    assert pids["actor"] == pids["critic"]
    assert not set(pids["actor"]) & set(pids["pair"])
    assert column(roles["critic"].plus(roles["actor"].plus.submit(batch(4)))) == [3, 4, 5, 6]
    assert column(two.plus(roles["actor"].plus.submit(batch(4)))) == [1, 2, 3, 4]
    assert roles["critic"].place()[2]["role"] == "critic"
    assert roles["actor"].place()[0]["colocated"] == ["actor", "critic"]
    with pytest.raises(ValueError, match="host no role 'ref'"):
        roles["actor"].spawn(["ref"])


def test_process_groups_of_colocated_roles_reduce_over_all_ranks(roles: Roles) -> None:
    for role in ("actor", "critic"):
        roles[role].init_model()
        assert roles[role].all_reduce() == [6.0] * 4


def test_a_pool_larger_than_the_cluster_is_refused(ray_cluster: None) -> None:
    with pytest.raises(ValueError, match=r"needs 100 CPU, but the cluster has 8"):
        RayResourcePool([100], use_gpu=False).slots()
    with pytest.raises(ValueError, match=r"needs 1 GPU, but the cluster has 0"):
        RayResourcePool([1], use_gpu=True).slots()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 11])
def test_colocated_processes_always_fit_into_one_slot(count: int) -> None:
    options = RayResourcePool([1], use_gpu=True, max_colocate_count=count).actor_options()
    assert count * options["num_gpus"] <= 1
    assert count * options["num_cpus"] <= 1


def test_local_and_ray_groups_give_the_same_results(ray_cluster: None) -> None:
    pool = RayResourcePool([1], use_gpu=False)
    spec = RayClassWithInitArgs(Calculator, offset=0.25)
    remote, local = RayWorkerGroup(pool, spec), LocalWorkerGroup(spec)
    try:
        answers = [_use_every_method(group) for group in (remote, local)]
    finally:
        remote.shutdown()
        pool.release()
    assert answers[0] == answers[1]


def test_a_released_group_leaves_its_slots_to_another(ray_cluster: None) -> None:
    for _ in range(3):  # of four CPUs each, on a Ray that has eight
        pool = RayResourcePool([1], use_gpu=False, cpus_per_slot=4.0, placement_timeout_s=30.0)
        RayWorkerGroup(pool, RayClassWithInitArgs(Calculator, offset=0.25)).release()


@pytest.mark.parametrize(("module", "name"), [("ray.util.placement_group", "placement_group"), ("ray", "wait")])
def test_a_reservation_that_is_interrupted_leaves_no_slots_reserved(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """While the second of two groups is asked for, or both are waited for."""
    plain, answers = getattr(sys.modules[module], name), iter([True] if name == "placement_group" else [])

    def interrupt(*args: Any, **options: Any) -> Any:
        if not next(answers, False):
            raise KeyboardInterrupt
        return plain(*args, **options)

    remove, states = ray.util.remove_placement_group, list[str]()

    def note(group: Any) -> None:
        states.append(ray.util.placement_group_table(group)["state"])
        remove(group)

    pool = RayResourcePool([1, 1], use_gpu=False, name_prefix=f"interrupted-{name}")
    monkeypatch.setattr(ray.util, "remove_placement_group", note)
    monkeypatch.setattr(sys.modules[module], name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.slots()
    assert states_of(pool) == {"REMOVED"}
    assert set(states) == {"CREATED"}, "Ray may keep the slots of one that was still being placed"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where a shell started this in the background, and so with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("while_reserving", [True, False], ids=["reserved", "released"])
def test_a_second_interrupt_does_not_keep_slots_from_being_given_back(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, interruptible: None, while_reserving: bool
) -> None:
    remove, interrupted, main = ray.util.remove_placement_group, threading.Event(), threading.main_thread().ident
    assert main is not None

    def interrupt_first(group: Any) -> None:
        if not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(30)
        remove(group)

    pool = RayResourcePool([1, 1], use_gpu=False, name_prefix=f"interrupted-twice-{while_reserving}")
    if not while_reserving:
        pool.slots()
    monkeypatch.setattr(ray.util, "remove_placement_group", interrupt_first)
    act = pool.slots if while_reserving else pool.release
    with monkeypatch.context() as patch:
        patch.setattr(ray, "wait", Mock(side_effect=KeyboardInterrupt("the first")))
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            act()
    interrupted.set()

    wait_until(lambda: states_of(pool) == {"REMOVED"}, "the slots are given back")


def test_an_interrupt_while_processes_end_does_not_keep_their_slots(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RayResourcePool([1], use_gpu=False, name_prefix="interrupted-end")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Calculator, offset=0.25))
    with monkeypatch.context() as patch:
        patch.setattr(group, "shutdown", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            group.release()
    group.shutdown()
    assert states_of(pool) == {"REMOVED"}


def test_ray_is_left_only_when_slots_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C may have ended the wait for that. A call to Ray after its end would hang, or start another."""
    done: list[str] = []
    placed, asked = threading.Event(), threading.Event()
    group = Mock(wait=lambda seconds: asked.set() or placed.wait(60))
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: done.append("given back"))
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("left"))
    monkeypatch.setattr(cluster, "_REAPERS", [])
    giving = threading.Thread(target=resource_pool._give_back, args=([group],), kwargs={"placing_s": 1.0})
    giving.start()
    assert asked.wait(60)
    leaving = threading.Thread(target=cluster.stop_ray)
    leaving.start()
    leaving.join(0.2)
    assert done == []
    placed.set()
    for thread in (giving, leaving):
        thread.join(60)
    assert done == ["given back", "left"]


def states_of(pool: RayResourcePool) -> set[str]:
    groups = ray.util.placement_group_table().values()
    return {group["state"] for group in groups if group["name"].startswith(pool.name_prefix)}


def _use_every_method(group: RayWorkerGroup | LocalWorkerGroup) -> list[object]:
    group.init_mesh(1)
    trained: DataProto = group.mesh_train(batch(3))
    return [
        group.describe("hi"),
        group.all_to_all([1]),
        group.all_to_all(1),
        group.multiply([2], [3]),
        column(group.plus(batch(3), 1)),
        column(group.plus(group.plus_later(batch(3), 2), 1)),
        column(group.mesh_plus(batch(3), other=group.plus_later(batch(3)))),
        group.total(batch(3)),
        group.only_rank_zero("a"),
        group.executed_by_rank_zero([1]),
        column(group.execute_with_func_generator(add_rank, batch(2))),
        group.wait_a_moment(),
        group.dp_size("actor"),
        trained.meta_info,
        group.execute_all_sync("not_registered"),
    ]


def test_every_process_says_when_it_worked_on_what(group: RayWorkerGroup) -> None:
    group.take_spans()
    before = time.time()
    group.describe("hi")
    group.wait_a_moment()
    spans = group.take_spans()
    assert [[span.method for span in of_rank] for of_rank in spans] == [["describe", "wait_a_moment"]] * 4
    for of_rank in spans:
        assert before <= of_rank[0].start <= of_rank[0].end <= of_rank[1].start <= time.time()
        assert of_rank[1].memory_gib is not None
        assert of_rank[1].memory_gib > 0.01
    assert group.take_spans() == [[]] * 4


@pytest.mark.usefixtures("unfrozen")
def test_processes_of_a_group_freeze_gc_and_the_callers_own_does_not(group: RayWorkerGroup) -> None:
    group.freeze_gc()
    assert group.execute_func_rank_zero(gc.get_freeze_count) > 10_000
    LocalWorkerGroup(RayClassWithInitArgs(Calculator)).freeze_gc()
    assert gc.get_freeze_count() == 0
