"""The HTTP client and the pool against real HTTP servers in this process that misbehave on purpose."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import pytest
from aiohttp import web

from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.remote import pool as pool_module
from dovetail.rollout.remote.client import HttpClient, ServerError, ServerGoneError, ServerTimeoutError
from dovetail.rollout.remote.pool import NoServerError, ServerPool
from tests.waiting import wait_in_loop, wait_until

pytestmark = pytest.mark.unit


class _Server:
    """`/work` answers after `delay_s`; `/tokens` grows if it `writes`, and is there if it `tells`; `kill` breaks every
    connection and closes the port, as a dead process would."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.healthy = True
        self.failing = False
        self.silent = False
        self.tells, self.writes, self.num_tokens = True, False, 0
        self.num_checks = 0
        self.asked = 0
        self.answered: Counter[str] = Counter()
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.get("/tokens", self._tokens)])
        app.add_routes([web.post("/work", self._work), web.post("/text", self._text)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        await web.SockSite(self._runner, listener).start()

    async def kill(self) -> None:
        if self._runner.server is not None:
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        self.num_checks += 1
        if self.silent:
            await asyncio.sleep(60)
        return web.Response(status=200 if self.healthy else 503)

    async def _work(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += 1
        if self.silent:
            await asyncio.sleep(60)
        await asyncio.sleep(self.delay_s)
        if self.failing:
            return web.json_response({"error": f"no luck with {body['job']}"}, status=500)
        self.answered[body["job"]] += 1
        return web.json_response({"job": body["job"], "by": self.url})

    async def _tokens(self, request: web.Request) -> web.Response:
        self.num_tokens += self.writes
        return web.json_response(self.num_tokens, status=200 if self.tells else 404)

    async def _text(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")


@asynccontextmanager
async def _serving(count: int, *, delay_s: float = 0.0, silence_s: float = 30.0) -> AsyncIterator[tuple[Any, ...]]:
    """The pool and its servers."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(_Server(delay_s)) for _ in range(count)]
        client = HttpClient()
        pool = ServerPool(
            [server.url for server in servers],
            client,
            num_tokens=lambda url: client.get(f"{url}/tokens"),
            interval_s=0.05,
            silence_s=silence_s,
            check_timeout_s=1.0,
        )
        stack.push_async_callback(client.close)
        stack.push_async_callback(pool.close)
        pool.start()
        async with asyncio.timeout(60):
            yield pool, *servers


def loads(pool: ServerPool) -> dict[str, int]:
    return {server: len(calls) for server, calls in pool._calls.items()}


def _work(pool: ServerPool, job: str, key: str | None = None) -> Awaitable[Any]:
    return pool.run(lambda url: pool.client.post(f"{url}/work", {"job": job}), key=key)


async def test_answers_are_json_or_text_or_nothing() -> None:
    async with _serving(1) as (pool, server):
        assert await pool.client.post(f"{server.url}/work", {"job": "a"}) == {"job": "a", "by": server.url}
        assert await pool.client.post(f"{server.url}/text") == "Cache flushed.\n"
        assert await pool.client.get(f"{server.url}/health") is None


async def test_errors_name_url_status_and_answer() -> None:
    async with _serving(1) as (pool, server):
        server.failing = True
        with pytest.raises(ServerError, match=r"POST http://127\S+/work answered HTTP 500: .*no luck with x") as caught:
            await pool.client.post(f"{server.url}/work", {"job": "x"})
        assert (caught.value.status, caught.value.url) == (500, f"{server.url}/work")
        with pytest.raises(ServerError, match=r"GET http://127\S+/nothing answered HTTP 404"):
            await pool.client.get(f"{server.url}/nothing")
        server.failing, server.delay_s = False, 5
        with pytest.raises(ServerTimeoutError, match=r"/work: no answer within 0.1 s"):
            await pool.client.post(f"{server.url}/work", {"job": "x"}, timeout_s=0.1)
        await server.kill()
        with pytest.raises(ServerGoneError, match=r"GET http://127\S+/health: no connection"):
            await pool.client.get(f"{server.url}/health")
        with pytest.raises(ValueError, match="'nonsense' is no URL"):
            await pool.client.get("nonsense")


async def test_a_server_killed_in_mid_batch_loses_and_doubles_nothing() -> None:
    async with _serving(2, delay_s=0.1) as (pool, first, second):
        jobs = [str(number) for number in range(60)]
        first.delay_s = 600.0
        tasks = [asyncio.ensure_future(_work(pool, job, key=f"group {int(job) // 4}")) for job in jobs]
        await wait_in_loop(lambda: first.asked and second.asked, "a request of each server")
        await first.kill()
        answers = await asyncio.gather(*tasks)
        assert [answer["job"] for answer in answers] == jobs
        assert {answer["by"] for answer in answers} == {second.url}
        assert second.answered == Counter(jobs)
        assert loads(pool) == {first.url: 0, second.url: 0}
        assert "connection" in pool.down()[first.url]


async def test_a_server_that_returns_serves_again_when_it_is_admitted() -> None:
    async with _serving(2, delay_s=0.05) as (pool, server, other):
        admitted: list[str] = []

        async def admit(url: str) -> None:
            admitted.append(url)
            if len(admitted) == 1:
                raise ServerError("its weights are old", url=url)

        pool._admit = admit
        await server.kill()
        await wait_in_loop(lambda: server.url in pool.down(), "the news of its end")
        await server.start()
        await wait_in_loop(lambda: server.url not in pool.down(), "its return")
        assert admitted == [server.url] * 2
        answers = await asyncio.gather(*(_work(pool, str(number)) for number in range(8)))
        assert {answer["by"] for answer in answers} == {server.url, other.url}


async def test_others_are_watched_while_a_server_that_is_back_loads_weights() -> None:
    async with _serving(2) as (pool, server, other):
        loading = asyncio.Event()

        async def admit(url: str) -> None:
            loading.set()
            await asyncio.sleep(3600)

        pool._admit = admit
        pool.mark_down(server.url, "it was away.")
        await loading.wait()
        await other.kill()
        await wait_in_loop(lambda: other.url in pool.down(), "the news of its end", seconds=30)


async def test_a_server_that_falls_silent_is_given_up_and_its_requests_move_on() -> None:
    async with _serving(2, silence_s=1.0) as (pool, server, other):
        server.silent = True
        answers = await asyncio.gather(*(_work(pool, str(number)) for number in range(8)))
        assert {answer["by"] for answer in answers} == {other.url}


async def test_a_server_that_is_healthy_and_generates_nothing_is_given_up_until_it_generates_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "STALL_S", 0.5)

    async with _serving(2) as (pool, server, other):
        server.delay_s = 600
        answers = await asyncio.gather(*(_work(pool, str(number)) for number in range(8)))
        assert {answer["by"] for answer in answers} == {other.url}
        assert server.asked > 0
        assert "answers its health checks and has generated no token for 0.5 s" in pool.down()[server.url]
        num_checks = server.num_checks
        await wait_in_loop(lambda: server.num_checks > num_checks + 2, "health checks that find it well")
        assert pool.up() == (other.url,)
        server.num_tokens += 1
        await wait_in_loop(lambda: server.url in pool.up(), "the server to be back")


def test_a_stall_from_before_a_server_was_down_is_not_held_against_it() -> None:
    """Its first prompt may take a while, as long as a stall."""

    async def count(server: str) -> int:
        return 0

    async def body() -> None:
        client: Any = None  # nothing is sent
        pool = ServerPool(["http://a"], client, num_tokens=count)
        pool._calls["http://a"].add(asyncio.get_running_loop().create_future())
        pool._progress_at["http://a"] = -math.inf
        assert not await pool._stalls("http://a"), "it is asked for its count first"
        pool._progress_at["http://a"] = -math.inf
        assert await pool._stalls("http://a")
        pool.mark_down("http://a", "it hangs")
        pool.mark_up("http://a")
        pool._calls["http://a"].add(asyncio.get_running_loop().create_future())
        assert not await pool._stalls("http://a")

    asyncio.run(body())


@pytest.mark.parametrize("tells", [True, False], ids=["tokens", "no count"])
async def test_a_server_whose_calls_are_long_is_not_given_up(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """It generates, or does not say whether it does."""
    monkeypatch.setattr(pool_module, "STALL_S", 0.3)

    async with _serving(1, delay_s=1.5) as (pool, server):
        server.tells, server.writes = tells, True
        assert (await _work(pool, "a"))["by"] == server.url
        assert pool.num_failures == 0


async def test_a_500_of_a_healthy_server_is_raised_and_one_of_a_dying_server_moves_on() -> None:
    async with _serving(2) as (pool, server, other):
        server.failing = other.failing = True
        with pytest.raises(ServerError, match=r"HTTP 500: .*no luck with x"):
            await _work(pool, "x")
        server.healthy, other.failing = False, False
        answers = await asyncio.gather(*(_work(pool, str(number)) for number in range(8)))
        assert {answer["by"] for answer in answers} == {other.url}


async def test_when_the_last_server_is_gone_every_request_fails_and_says_so() -> None:
    async with _serving(1, delay_s=5) as (pool, server):
        tasks = [asyncio.ensure_future(_work(pool, str(number))) for number in range(4)]
        await wait_in_loop(lambda: server.asked, "a request")
        await server.kill()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, NoServerError)
            assert "none of 1 servers is up" in str(outcome)


async def test_cancelling_a_request_frees_its_place() -> None:
    async with _serving(1, delay_s=5) as (pool, server):
        task = asyncio.ensure_future(_work(pool, "x"))
        await wait_in_loop(lambda: server.asked, "a request")
        assert loads(pool) == {server.url: 1}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert loads(pool) == {server.url: 0}
        assert pool.up() == (server.url,)


def test_a_wait_for_the_loop_that_is_too_long_ends_what_it_waited_for() -> None:
    thread = LoopThread("test")

    async def num_others() -> int:
        return len(asyncio.all_tasks()) - 1

    with pytest.raises(TimeoutError):
        thread.run(asyncio.sleep(600), timeout_s=0.05)
    wait_until(lambda: not thread.run(num_others()), "it to end")
    thread.close()


def test_the_loop_runs_coroutines_of_other_threads_and_ends_with_what_is_left() -> None:
    thread = LoopThread("test")

    async def double(value: int) -> int:
        await asyncio.sleep(0.01)
        return 2 * value

    assert thread.run(double(4)) == 8
    waiting = thread.start(asyncio.sleep(60))
    thread.close()
    thread.close()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(double(1))
