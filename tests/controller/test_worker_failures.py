"""Real Ray workers that fail or hang: who, where, doing what, not who waits for it; and nobody is left hanging."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.controller import (
    Dispatch,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    register,
)
from dovetail.controller import watchdog as watchdog_module
from dovetail.controller.hangs import CallLimits
from dovetail.observability import waits
from dovetail.observability.progress import note_progress
from dovetail.protocol import DataProto
from tests.controller.conftest import Roles
from tests.controller.worker_examples import Calculator, Collective, batch, column
from tests.waiting import wait_until_gone

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("controller")]

# Far below the limit of a collective, which is what nobody may wait for.
IN_TIME = pytest.mark.timeout(90, func_only=True)


def test_an_exception_arrives_with_role_rank_method_and_the_workers_traceback(roles: Roles) -> None:
    with pytest.raises(WorkerError) as caught:
        roles["critic"].fail_on(2)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("critic", 2, "fail_on")
    assert error.pid == roles["critic"].identities[2].pid
    assert isinstance(error.exception, KeyError)
    assert isinstance(error.__cause__, KeyError)
    text = str(error)
    assert "critic[rank 2].fail_on failed in pid" in text
    assert "KeyError: 'no such thing on 2'" in text
    assert 'worker_examples.py", line' in text
    assert 'raise KeyError(f"no such thing on {rank}")' in text
    assert "site-packages/ray" not in text, "the reader wants the worker's frames, not Ray's"


def test_a_group_whose_ranks_all_finished_stays_usable_after_an_exception(roles: Roles) -> None:
    future = roles["actor"].fail_on_later(1)
    with pytest.raises(WorkerError, match=r"actor\[rank 1\].fail_on_later"):
        future.get()
    assert roles["actor"].ping() == [0, 1, 2, 3]


def test_a_failure_upstream_of_a_chain_is_reported_as_itself(roles: Roles) -> None:
    broken = roles["actor"].fail_with_batch(batch(4))
    with pytest.raises(WorkerError, match="upstream is broken") as caught:
        roles["critic"].plus(broken)
    assert (caught.value.role, caught.value.method) == ("actor", "fail_with_batch")
    assert column(roles["critic"].plus(batch(4))) == [2, 3, 4, 5]


def test_a_worker_that_cannot_be_built_says_why(pool: RayResourcePool) -> None:
    with pytest.raises(WorkerError, match="ValueError: cannot be built on rank 0") as caught:
        RayWorkerGroup(pool.split(1)[3], RayClassWithInitArgs(Calculator, fail_on_rank=0), name_prefix="ref")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("ref", 0, "__init__")


@IN_TIME
def test_an_exception_before_a_collective_stops_the_ranks_that_wait_in_it(two: RayWorkerGroup) -> None:
    two.init_model()
    with pytest.raises(WorkerError, match="out of patience") as caught:
        two.all_reduce_unless(1, "raise")
    assert caught.value.rank == 1
    assert any("Ranks [0] of pair were still running and were stopped" in note for note in caught.value.__notes__)
    wait_until_gone(*[identity.pid for identity in two.identities])
    with pytest.raises(WorkerError, match="out of patience"):
        two.ping()


def test_a_worker_that_dies_between_calls_is_named_by_the_next_call_of_any_group(
    two: RayWorkerGroup, roles: Roles
) -> None:
    victim = two.identities[1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_until_gone(*[identity.pid for identity in two.identities])  # its peer is stopped too
    with pytest.raises(WorkerDiedError, match=rf"pair\[rank 1\] died \(pid {victim.pid} on node .*\) between calls"):
        roles["actor"].ping()
    assert roles["actor"].ping() == [0, 1, 2, 3], "said once; the other group goes on"
    with pytest.raises(WorkerDiedError, match=r"pair\[rank 1\] died"):
        two.ping()


@IN_TIME
def test_a_wait_does_not_outlive_the_death_of_another_group(pool: RayResourcePool) -> None:
    """Two groups may meet in one collective (weights to an engine): nobody may wait for the dead half."""
    slots = pool.split(1)
    trainer = RayWorkerGroup(slots[0], RayClassWithInitArgs(Collective), name_prefix="trainer", failure_grace_s=1.0)
    engine = RayWorkerGroup(slots[1], RayClassWithInitArgs(Collective), name_prefix="engine")
    receiving = engine.wait_for_ever.submit()
    os.kill(engine.identities[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"engine\[rank 0\] died .* while running 'wait_for_ever'"):
        trainer.wait_for_ever()
    wait_until_gone(*[trainer.identities[0].pid])
    with pytest.raises(WorkerDiedError, match=r"engine\[rank 0\] died"):
        receiving.get()


@IN_TIME
def test_a_wait_that_looks_after_another_group_outlives_its_death(pool: RayResourcePool, tmp_path: Path) -> None:
    """An update must not be lost because an engine that generates beside it has died."""
    slots = pool.split(1)
    trainer = RayWorkerGroup(slots[0], RayClassWithInitArgs(Collective), name_prefix="trainer", failure_grace_s=1.0)
    engine = RayWorkerGroup(slots[1], RayClassWithInitArgs(Collective), name_prefix="engine")
    gate = tmp_path / "gate"
    update = trainer.gated_plus(batch(1), str(gate))
    os.kill(engine.identities[0].pid, signal.SIGKILL)

    def look() -> None:
        try:
            engine.ping()
        except WorkerDiedError:
            gate.touch()

    try:
        assert column(update.get(meanwhile=look)) == [1]
        assert trainer.ping() == [0], "the death is known, and no later call is told of it"
        with pytest.raises(WorkerDiedError, match=r"engine\[rank 0\] died"):
            engine.ping()
    finally:
        trainer.shutdown()  # else it keeps its slot until the garbage collector looks


def test_a_method_that_returns_no_batch_is_told_so(group: RayWorkerGroup) -> None:
    with pytest.raises(TypeError, match="must return a DataProto on every collecting rank, but one returned int"):
        group.execute_with_func_generator(_number_of_rows, batch(4))


@IN_TIME
def test_a_kill_in_a_collective_is_named_and_stops_the_others(roles: Roles) -> None:
    roles["actor"].init_model()
    pids = [identity.pid for identity in roles["actor"].identities]
    with pytest.raises(WorkerDiedError) as caught:
        roles["actor"].all_reduce_unless(2, "kill")
    error = caught.value
    assert (error.role, error.rank, error.method, error.pid) == ("actor", 2, "all_reduce_unless", pids[2])
    assert error.node in str(error)
    wait_until_gone(*pids)
    with pytest.raises(WorkerDiedError, match=r"actor\[rank 2\] died"):
        roles["critic"].ping()


def _number_of_rows(worker: Collective, data: DataProto) -> int:
    return len(data)


def note_for(seconds: float) -> None:
    """As an engine that generates."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        note_progress()
        time.sleep(0.05)


class Sleeper(Collective):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_unless_asleep(self, sleeping_rank: int) -> float:
        if self.rank == sleeping_rank:
            self.fall_asleep()
        return self.all_reduce()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute(self, seconds: float) -> float:
        if self.rank == 0:
            note_for(seconds)
        return self.all_reduce()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute_and_fall_asleep(self) -> None:
        note_for(1.5)
        self.fall_asleep()

    def fall_asleep(self) -> None:
        threading.Event().wait(600)


class Computer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute(self, seconds: float) -> None:
        note_for(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute_and_stop(self, seconds: float, pause: float) -> None:
        note_for(seconds)
        time.sleep(pause)


@pytest.fixture
def pair(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(pool.split(2)[1], RayClassWithInitArgs(Sleeper), name_prefix="sleepers")
    group.init_model()
    yield group
    group.shutdown()


@pytest.mark.parametrize("sleeping", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_call_past_its_limit_names_the_rank_that_is_not_in_the_collective(
    pair: RayWorkerGroup, sleeping: int
) -> None:
    pair._processes.limits = CallLimits(first_limit_s=3.0)
    with pytest.raises(WorkerHungError) as caught:
        pair.reduce_unless_asleep(sleeping)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("sleepers", sleeping, "reduce_unless_asleep")
    assert error.pid == pair.identities[sleeping].pid
    assert f"Ranks [{1 - sleeping}] wait for it in a collective." in error.reason
    assert "in fall_asleep" in error.worker_traceback, "where it hangs"
    with pytest.raises(WorkerHungError):
        pair.ping()


def test_a_call_past_its_limit_goes_on_while_a_rank_computes(pair: RayWorkerGroup) -> None:
    pair._processes.limits = CallLimits(first_limit_s=1.0)
    assert pair.compute(3.0) == [1.0, 1.0]
    with pytest.raises(WorkerHungError, match="computes nothing any more: for 1 s"):
        pair.compute_and_fall_asleep()


def test_a_call_without_ray_goes_on_past_its_limit_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.05)
    monkeypatch.setattr(waits, "_REGISTER", waits._Register())
    group = LocalWorkerGroup(RayClassWithInitArgs(Computer), limits=CallLimits(first_limit_s=0.3))
    hung: list[WorkerError] = []
    group.when_hung(hung.append)
    group.compute(1.0)
    assert hung == []
    group.compute_and_stop(0.4, 1.0)
    assert "computes nothing any more" in str(hung[0])


def test_a_stopped_worker_is_named_while_another_waits_for_it(
    pair: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "STOPPED_S", 1.0)
    victim = pair.identities[1].pid
    os.kill(victim, signal.SIGSTOP)
    with pytest.raises(
        WorkerHungError, match=rf"sleepers\[rank 1\] hangs \(pid {victim} on node .*is stopped"
    ) as caught:
        pair.all_reduce()
    assert caught.value.method == "all_reduce"
    wait_until_gone(victim)  # a stopped process must be killed
