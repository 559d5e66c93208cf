"""Which server a request goes to, whatever servers do in the meantime."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.rollout.remote import pool as pool_module
from dovetail.rollout.remote.pool import NoServerError, ServerPool

pytestmark = pytest.mark.unit

SERVERS = ["http://a:1", "http://b:1", "http://c:1"]


class Call:
    """Stands for a request that runs on a server."""

    is_lost = False

    def cancel(self) -> None:
        self.is_lost = True


def pool_of(servers: list[str] = SERVERS) -> ServerPool:
    client: Any = None
    return ServerPool(servers, client)


def begin(pool: ServerPool, key: str | None = None) -> tuple[str, Any]:
    server, call = pool._choose(key), Call()
    calls: set[Any] = pool._calls[server]
    calls.add(call)
    return server, call


def test_requests_without_a_key_spread_evenly() -> None:
    pool = pool_of()
    assert Counter(begin(pool)[0] for _ in range(30)) == dict.fromkeys(SERVERS, 10)


def test_a_key_stays_on_its_server_even_when_that_is_the_busiest() -> None:
    pool = pool_of()
    first, _ = begin(pool, "conversation")
    for _ in range(5):
        assert begin(pool, "conversation")[0] == first
    assert first not in {begin(pool, f"other {n}")[0] for n in range(4)}


def test_a_key_moves_when_its_server_leaves_and_does_not_move_back() -> None:
    pool = pool_of(SERVERS[:2])
    first, call = begin(pool, "k")
    pool.mark_down(first, "gone")
    assert call.is_lost
    second, _ = begin(pool, "k")
    assert second != first
    pool.mark_up(first)
    assert begin(pool, "k")[0] == second


def test_when_none_is_left_the_error_says_why_for_each() -> None:
    pool = pool_of(SERVERS[:2])
    pool.mark_down(SERVERS[0], "connection refused")
    pool.mark_down(SERVERS[1], "HTTP 503")
    with pytest.raises(NoServerError, match=r"none of 2 servers is up \(http://a:1: connection refused; http://b:1"):
        pool._choose(None)


def test_two_pools_do_not_both_begin_with_the_first_server() -> None:
    assert len({pool_of()._choose(f"{rank}-0") for rank in range(16)}) == 3


def test_misuse_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least one server"):
        pool_of([])
    with pytest.raises(ValueError, match="'http://x' is given twice"):
        pool_of(["http://x", "http://x/"])


def test_old_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_STICKY_KEYS", 10)
    pool = pool_of()
    for number in range(100):
        pool._choose(str(number))
    assert list(pool._sticky) == [str(number) for number in range(90, 100)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 5)),
        st.tuples(st.just("down"), st.integers(0, 2)),
        st.tuples(st.just("up"), st.integers(0, 2)),
    ),
    max_size=80,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_keys_stick_while_their_server_is_up_and_all_else_goes_to_the_least_loaded(
    steps: list[tuple[str, int]],
) -> None:
    pool = pool_of()
    held: list[tuple[str, Any]] = []
    home: dict[str, str] = {}
    down: set[str] = set()
    for step, number in steps:
        if step == "begin":
            key = f"key {number}" if number else None
            if len(down) == 3:
                with pytest.raises(NoServerError):
                    pool._choose(key)
                continue
            before = Counter(server for server, _ in held)
            server, call = begin(pool, key)
            assert server not in down
            if key is not None and home.get(key) not in (None, *down):
                assert server == home[key]
            else:
                assert before[server] == min(before[name] for name in SERVERS if name not in down)
            if key is not None:
                home[key] = server
            held.append((server, call))
        elif step == "down":
            server = SERVERS[number]
            pool.mark_down(server, "test")
            assert all(call.is_lost == (name == server) for name, call in held)
            held = [(name, call) for name, call in held if name != server]
            down.add(server)
        else:
            pool.mark_up(SERVERS[number])
            down.discard(SERVERS[number])
