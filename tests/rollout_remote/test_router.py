"""The router's bookkeeping: every request counted once, whatever servers do in the meantime."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.rollout.remote.router import Lease, NoServerError, Router

pytestmark = pytest.mark.unit

SERVERS = ["http://a:1", "http://b:1", "http://c:1"]


def test_requests_without_a_key_spread_evenly() -> None:
    router = Router(SERVERS)
    leases = [router.acquire() for _ in range(30)]
    assert Counter(lease.server for lease in leases) == dict.fromkeys(SERVERS, 10)


def test_a_key_stays_on_its_server_even_when_that_is_the_busiest() -> None:
    router = Router(SERVERS)
    first = router.acquire("conversation").server
    for _ in range(5):
        assert router.acquire("conversation").server == first
    others = {router.acquire(f"other {n}").server for n in range(4)}
    assert first not in others


def test_a_key_moves_when_its_server_leaves_and_does_not_move_back() -> None:
    router = Router(SERVERS[:2])
    lease = router.acquire("k")
    (lost,) = router.mark_down(lease.server, "gone")
    assert lost is lease
    assert lease.lost
    second = router.acquire("k")
    assert second.server != lease.server
    router.mark_up(lease.server)
    assert router.acquire("k").server == second.server


def test_a_late_release_takes_nothing_from_a_server_that_returned() -> None:
    router = Router(SERVERS[:1])
    old = router.acquire()
    router.mark_down(SERVERS[0], "gone")
    router.mark_up(SERVERS[0])
    fresh = router.acquire()
    old.release()
    old.release()
    assert router.loads() == {SERVERS[0]: 1}
    fresh.release()
    fresh.release()
    assert router.loads() == {SERVERS[0]: 0}


def test_when_none_is_left_the_error_says_why_for_each() -> None:
    router = Router(SERVERS[:2])
    router.mark_down(SERVERS[0], "connection refused")
    router.mark_down(SERVERS[1], "HTTP 503")
    with pytest.raises(NoServerError, match=r"none of 2 servers is up \(http://a:1: connection refused; http://b:1"):
        router.acquire()


def test_two_routers_do_not_both_begin_with_the_first_server() -> None:
    first = {Router(SERVERS).acquire(f"{rank}-0").server for rank in range(16)}
    assert len(first) == 3


def test_misuse_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least one server"):
        Router([])
    with pytest.raises(ValueError, match="'x' is given twice"):
        Router(["x", "x"])
    with pytest.raises(ValueError, match="'y' is no server"):
        Router(["x"]).mark_down("y", "")


def test_old_keys_are_forgotten() -> None:
    router = Router(SERVERS, max_sticky_keys=10)
    for number in range(100):
        router.acquire(str(number)).release()
    assert len(router._sticky) == 10


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(0, 5)),
        st.tuples(st.just("release"), st.integers(0, 50)),
        st.tuples(st.just("down"), st.integers(0, 2)),
        st.tuples(st.just("up"), st.integers(0, 2)),
    ),
    max_size=80,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_loads_always_equal_the_leases_held_and_keys_stick_while_their_server_is_up(
    steps: list[tuple[str, int]],
) -> None:
    router = Router(SERVERS)
    held: list[Lease] = []
    everything: list[Lease] = []
    home: dict[str, str] = {}
    down: set[str] = set()
    for step, number in steps:
        if step == "acquire":
            key = f"key {number}" if number else None
            if len(down) == 3:
                with pytest.raises(NoServerError):
                    router.acquire(key)
                continue
            before = router.loads()
            lease = router.acquire(key)
            assert lease.server not in down
            if key is not None and home.get(key) not in (None, *down):
                assert lease.server == home[key]
            else:
                assert before[lease.server] == min(load for name, load in before.items() if name not in down)
            if key is not None:
                home[key] = lease.server
            held.append(lease)
            everything.append(lease)
        elif step == "release" and everything:
            lease = everything[number % len(everything)]  # perhaps one that was released or lost before
            lease.release()
            held = [other for other in held if other is not lease]
        elif step == "down":
            server = SERVERS[number]
            lost = router.mark_down(server, "test")
            assert set(lost) == {lease for lease in held if lease.server == server}
            held = [lease for lease in held if lease.server != server]
            down.add(server)
        elif step == "up":
            router.mark_up(SERVERS[number])
            down.discard(SERVERS[number])
        assert router.loads() == {name: sum(lease.server == name for lease in held) for name in SERVERS}


def test_under_many_threads_and_servers_that_come_and_go_every_job_is_done_once() -> None:
    router = Router(SERVERS)
    done: Counter[int] = Counter()
    guard = threading.Lock()
    stop = threading.Event()

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for number in range(200):
            job = worker * 200 + number
            while True:
                with router.acquire(f"group {chance.randrange(40)}") as lease:
                    if chance.random() < 0.3:
                        stop.wait(0.0005)
                    if lease.lost:
                        continue
                    with guard:
                        done[job] += 1
                    break

    def disturb() -> None:
        chance = random.Random(99)
        while not stop.is_set():
            server = chance.choice(SERVERS[1:])  # one always stays
            router.mark_down(server, "test")
            stop.wait(0.001)
            router.mark_up(server)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    troublemaker = threading.Thread(target=disturb)
    troublemaker.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    troublemaker.join(10)
    assert done == Counter(range(16 * 200))
    assert router.loads() == dict.fromkeys(SERVERS, 0)
