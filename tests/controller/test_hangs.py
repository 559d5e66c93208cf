"""Workers that exist and do not go on: the one that hangs is named, not the one that waits for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from dovetail.controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerHungError,
    register,
)
from dovetail.controller import watchdog as watchdog_module
from dovetail.controller.hangs import CallLimits
from tests.controller.worker_examples import Collective
from tests.waiting import wait_until_gone

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("controller")]


class Sleeper(Collective):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_unless_asleep(self, sleeping_rank: int) -> float:
        if self.rank == sleeping_rank:
            self.fall_asleep()
        return self.all_reduce()

    def fall_asleep(self) -> None:
        threading.Event().wait(600)


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
