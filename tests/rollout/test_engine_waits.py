"""Engines that stop answering: each wait for one ends with its name, and the task that looks at servers survives."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from dovetail.controller.hangs import CallLimits
from dovetail.observability import waits
from dovetail.observability.stalls import StalledError
from dovetail.observability.waits import WaitTimeout
from dovetail.rollout import gate as gate_module
from dovetail.rollout import loop_thread
from dovetail.rollout.base import STALL_S, EngineDiedError, GenerationRequest, SamplingParams
from dovetail.rollout.gate import StepGate
from dovetail.rollout.loop_thread import LoopThread
from dovetail.rollout.remote import calls as remote_calls
from dovetail.rollout.remote.calls import SampleCalls
from dovetail.rollout.remote.client import ServerGoneError, ServerTimeoutError
from dovetail.rollout.remote.pool import NoServerError, ServerPool
from dovetail.rollout.remote.samples import Part, RemoteSample, samples_of
from dovetail.rollout.stream import EngineStream, FailedRequest
from tests.agents.fakes import in_virtual_time
from tests.waiting import wait_in_loop, wait_until

pytestmark = pytest.mark.unit


def test_a_control_that_waits_for_a_step_without_an_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_LONG_STEP_S", 0.0)
    gate, in_step, end = StepGate(), threading.Event(), threading.Event()

    def step() -> bool:
        in_step.set()
        return end.wait(60)

    driving = threading.Thread(target=gate.drive, args=(step, end.is_set), daemon=True)
    pausing = threading.Thread(target=gate.pause, daemon=True)
    driving.start()
    assert in_step.wait(60)
    pausing.start()

    def named() -> list[str]:
        return [str(wait) for wait in waits._REGISTER.look() if wait.thread == pausing.ident]

    [words] = wait_until(named, "a wait over its limit")
    assert words.startswith("a control of the engine waits for the step in flight to end since")
    end.set()
    for thread in (driving, pausing):
        thread.join(60)
        assert not thread.is_alive()
    assert gate.paused


async def test_a_look_that_fails_does_not_end_the_watch_over_the_servers() -> None:
    class Client:
        num_looks = 0

        async def get(self, url: str, timeout_s: float | None = None) -> None:
            self.num_looks += 1
            if self.num_looks == 1:
                raise ValueError("a bug in a health check")
            raise ServerGoneError("nobody is there", url=url)

    client: Any = Client()
    pool = ServerPool(["http://a"], client, interval_s=0.001)
    pool.start()
    await wait_in_loop(pool.down, "a server that is down")
    await pool.close()
    assert "nobody is there" in pool.down()["http://a"]


def test_responses_that_do_not_end_after_a_failed_update_are_counted_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_calls, "_FAIL_S", 0.02)

    async def fail() -> None:
        nothing: Any = None
        calls = remote_calls.SampleCalls(nothing, nothing, nothing)
        calls._live[nothing] = nothing
        await calls.fail("the model is gone")

    with pytest.raises(WaitTimeout, match=r"the engine waits for responses to end after a failure.*1 are left"):
        asyncio.run(fail())


def test_the_id_of_an_aborted_request_is_free_when_abort_returns() -> None:
    async def abort() -> tuple[int, int, list[str | None]]:
        nothing: Any = None
        calls = remote_calls.SampleCalls(nothing, nothing, nothing)
        calls.is_open = False
        ended: list[str | None] = []
        samples = samples_of(GenerationRequest("a", [5], SamplingParams(n=2)), eos_ids=frozenset(), max_model_len=9)
        await calls.start(samples, lambda sample, error: ended.append(sample.finish_reason))
        return await calls.abort({"a"}), calls.num_live, ended

    assert asyncio.run(abort()) == (2, 0, ["abort", "abort"])


@pytest.mark.parametrize("usual_s", [1, 10, 60, 600])
def test_an_engine_that_hangs_is_noticed_and_its_work_done_again_before_the_driver_gives_up(usual_s: float) -> None:
    limits = CallLimits()
    limits.record("actor_rollout", "generate_sequences", usual_s)
    # Servers are asked for their tokens once in a tenth of the time.
    assert usual_s + 1.1 * STALL_S + usual_s < limits.limit("actor_rollout", "generate_sequences").hung_s


@pytest.mark.parametrize("timeout", [None, 0.001], ids=["one call", "many calls"])
def test_a_vllm_actor_that_writes_no_token_is_dead_unless_it_is_paused(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    from dovetail.rollout.vllm import ray_engine

    monkeypatch.setattr(ray_engine, "STALL_S", 0.05)
    num_looks = 0

    def no_token(seconds: float) -> ray_engine.Progress:
        nonlocal num_looks
        num_looks += 1
        return ray_engine.Progress([], num_tokens=5, paused=num_looks <= 200)

    def give_up(error: EngineDiedError) -> None:
        raise error

    engine = ray_engine.RayVLLMEngine.__new__(ray_engine.RayVLLMEngine)
    engine._gate = StepGate()
    running: Any = {"a": None}
    engine._running = running
    monkeypatch.setattr(engine, "_take", no_token)
    monkeypatch.setattr(engine, "_replace", give_up)

    def wait() -> None:
        while num_looks < 10**6:
            engine.wait(lambda: False, timeout)

    with pytest.raises(EngineDiedError, match="the vLLM engine hangs: this worker waits for 1 requests"):
        wait()
    assert num_looks > 200, "as long as it is paused it owes no token"


class FakeActor:
    """Calls are made when their result is asked for; one that is not alive lets Ray's error out."""

    def __init__(self, *, alive: bool = True, start: Callable[[], Any] = int, refused: str = "") -> None:
        self.alive, self.start_engine, self.refused = alive, start, refused
        self.started, self.taken = False, []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: lambda: self._run(name, *args))

    def _run(self, name: str, *args: Any) -> Any:
        from ray.exceptions import RayActorError

        if not self.alive:
            raise RayActorError
        if name == "start":
            self.start_engine()
            self.started = True
            return
        assert self.started, "an engine that is starting takes no requests"
        names = [request.request_id for request in args[0]]
        if self.refused in names:
            raise ValueError(f"{self.refused} is refused")
        self.taken += names


def vllm_with_a_dead_actor(monkeypatch: pytest.MonkeyPatch, fresh: FakeActor) -> Any:
    from dovetail.rollout.vllm import ray_engine

    fake_ray = SimpleNamespace(get=lambda call, timeout: call(), kill=lambda actor: setattr(actor, "alive", False))
    monkeypatch.setattr(ray_engine, "actor_class", lambda: SimpleNamespace(remote=lambda *args: fresh))
    engine = ray_engine.RayVLLMEngine.__new__(ray_engine.RayVLLMEngine)
    vars(engine).update(_ray=fake_ray, settings=SimpleNamespace(load_format="auto"), _bucket_bytes=1, _on_device={})
    vars(engine).update(_version=0, _running={}, restarts_left=1, _replacing=threading.RLock())
    engine.actor = FakeActor(alive=False)
    return engine


def test_a_request_that_comes_while_a_dead_vllm_actor_is_replaced_runs_once_on_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_done, starting = threading.Event(), threading.Event()

    def start() -> None:
        starting.set()
        late_done.wait(0.5)  # a caller that does not wait for the new engine finds it without one

    fresh = FakeActor(start=start)
    engine = vllm_with_a_dead_actor(monkeypatch, fresh)
    engine.enqueue([GenerationRequest("early", [5])], print)  # it is sent again with the new engine
    replacing = threading.Thread(target=engine._replace, args=(EngineDiedError("killed"),))
    replacing.start()
    assert starting.wait(30)
    engine.enqueue([GenerationRequest("late", [5])], print)
    late_done.set()
    replacing.join(30)
    assert fresh.taken == ["early", "late"]


def test_a_request_that_a_new_vllm_actor_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, failed = FakeActor(refused="bad"), []
    engine = vllm_with_a_dead_actor(monkeypatch, fresh)
    engine.enqueue([GenerationRequest(name, [5]) for name in ("a", "bad", "b")], failed.append)
    engine._replace(EngineDiedError("killed"))
    assert fresh.taken == list(engine._running) == ["a", "b"]
    assert [(one.request_id, str(one.error)) for one in failed] == [("bad", "bad is refused")]


def test_a_request_that_is_refused_and_reported_failed_is_raised_once() -> None:
    """Its engine may be replaced between its refusal and the end of `submit`."""

    class Engine:
        def enqueue(self, requests: Any, deliver: Any) -> None:
            deliver(FailedRequest("bad", ValueError("refused")))
            raise ValueError("refused")

        def wait(self, done: Callable[[], bool], timeout: float | None) -> None:
            assert done()

    engine: Any = Engine()
    stream = EngineStream(engine)
    with pytest.raises(ValueError, match="refused"):
        stream.submit(GenerationRequest("bad", [5]))
    stream.wait()


def test_a_vllm_actor_that_could_not_start_is_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise RuntimeError("no memory left")

    engine = vllm_with_a_dead_actor(monkeypatch, FakeActor(start=start))
    with pytest.raises(RuntimeError, match="no memory left"):
        engine._replace(EngineDiedError("killed"))
    with pytest.raises(EngineDiedError, match="process of the vLLM engine died"):
        engine.num_tokens()


def test_a_wait_for_sglang_goes_on_when_another_thread_that_waits_starts_the_servers_again() -> None:
    from dovetail.rollout.sglang import SGLangRollout

    engine = SGLangRollout.__new__(SGLangRollout)
    vars(engine).update(_progress=threading.Condition(), _restart_wanted=True)
    num_asked = 0

    def done() -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:  # this thread was woken for the restart, and the other one is the first to take it
            engine._restart_wanted = False
        return num_asked > 5

    engine.wait(done, timeout=60)
    assert done(), "it returned before it was done"


def test_a_function_that_blocks_the_event_loop_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_thread, "_BLOCKED_S", 0.1)
    loop, release = LoopThread("agents"), threading.Event()

    async def blocks() -> None:
        release.wait(60)

    loop.start(blocks())
    wait_until(lambda: any("event loop agents" in str(wait) for wait in waits._REGISTER.look()), "a wait that is named")
    release.set()
    assert "in blocks" in caplog.text
    loop.close()


def test_a_function_that_blocks_the_event_loop_for_too_long_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_TICK_S", 0.01)
    loop, release, began = LoopThread("agents"), threading.Event(), threading.Event()

    async def blocks() -> None:
        began.set()
        release.wait(60)

    loop.refuse_blocked(60.0)
    loop.start(blocks())
    began.wait(60)
    time.sleep(0.05)
    loop.refuse_blocked(60.0)
    assert not loop.is_stalled
    with pytest.raises(StalledError, match=r"(?s)event loop agents is blocked by a function that .* in blocks\n"):
        loop.refuse_blocked(0.03)
    assert loop.is_stalled
    release.set()
    loop.close()


class InItsLoop(ServerPool):
    def mark_down(self, server: str, reason: str) -> None:
        asyncio.get_running_loop()  # raises elsewhere
        super().mark_down(server, reason)

    def mark_up(self, server: str) -> None:
        asyncio.get_running_loop()
        super().mark_up(server)


def test_requests_of_an_sglang_server_that_is_started_again_move_on_at_once() -> None:
    from dovetail.rollout.sglang import SGLangRollout

    loop, began_on = LoopThread("test"), Future[str]()
    urls = ("http://a", "http://b")
    servers = {url: SimpleNamespace(url=url, death="", start=int, wait_until_ready=int) for url in urls}
    client: Any = None  # nothing is watched
    pool = InItsLoop(urls, client)

    async def call(server: str) -> str:
        if not began_on.done():
            began_on.set_result(server)
            await asyncio.Event().wait()
        return server

    engine = SGLangRollout.__new__(SGLangRollout)
    vars(engine).update(servers=servers, restarts_left=1, _loop=loop, _pool=pool, _has_no_weights=False)
    vars(engine).update(_sglang=SimpleNamespace(restarted=str), _updater=SimpleNamespace(has_updated=False))
    ended = loop.start(pool.run(call))
    dead = servers[began_on.result(30)]
    dead.death = "it was killed"
    engine.restart(EngineDiedError(dead.death))
    assert ended.result(30) in urls  # the new one may be up already
    assert pool.up() == urls
    loop.close()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """An SGLang engine with one restart, and its only server, which is alive, silent and down."""
    from dovetail.rollout.sglang import SGLangRollout
    from dovetail.rollout.sglang import engine as module
    from dovetail.rollout.sglang.server import SGLangServer

    monkeypatch.setattr(module, "_EXIT_S", 0.0)
    loop, client = LoopThread("test"), cast("Any", None)
    server = SGLangServer.__new__(SGLangServer)
    vars(server).update(url="http://a", _process=None, _ports=[], _command=["sleep", "600"], _environment=None)
    vars(server).update(wait_until_ready=int, _killed_for="")
    server.start()
    pool = InItsLoop([server.url], client)
    engine = SGLangRollout.__new__(SGLangRollout)
    vars(engine).update(servers={server.url: server}, restarts_left=1, _loop=loop, _pool=pool, _has_no_weights=False)
    vars(engine).update(_sglang=SimpleNamespace(restarted=str), _updater=SimpleNamespace(has_updated=False))
    vars(engine).update(_calls=SimpleNamespace(is_open=True), _progress=threading.Condition(), _restart_wanted=False)
    vars(engine).update(_restarting=threading.RLock())
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(pool, "health_problem", AsyncMock(return_value=ServerTimeoutError("silence", url="http://a")))

    async def take_out() -> None:
        pool.mark_down(server.url, "it is silent.")

    loop.run(take_out())
    yield engine, server
    server.close()
    loop.close()


def test_an_sglang_server_that_hangs_is_started_again_like_one_that_died(hanging: tuple[Any, Any]) -> None:
    engine, server = hanging
    before = server.pid
    engine._run(engine._no_server(NoServerError("none is up")))
    assert engine._restart_wanted
    engine.restart(EngineDiedError(server.death))
    assert engine._pool.up() == (server.url,)
    assert server.pid != before
    assert not server.death


def test_an_sglang_server_that_hangs_with_no_restart_left_is_an_engine_that_died(hanging: tuple[Any, Any]) -> None:
    engine, _ = hanging
    engine.restarts_left = 0
    with pytest.raises(EngineDiedError, match="was killed: it is silent"):
        engine._run(engine._no_server(NoServerError("none is up")))


def test_an_sglang_server_that_waits_for_weights_is_left_alone(
    hanging: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = hanging
    monkeypatch.setattr(engine._pool, "health_problem", AsyncMock(return_value=None))
    with pytest.raises(NoServerError):
        engine._run(engine._no_server(NoServerError("none is up")))
    assert not server.death


@pytest.fixture
def hanging_beside(hanging: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[str]]:
    """That engine with a second server, which works, and weights that it has been sent. Whose weights are brought back
    is in the list."""
    engine, server = hanging
    other, brought = SimpleNamespace(url="http://b", death="", kill=None), list[str]()
    engine.servers[other.url] = other
    engine._pool = pool = InItsLoop([server.url, other.url], cast("Any", None), num_tokens=AsyncMock(return_value=0))
    monkeypatch.setattr(pool, "health_problem", AsyncMock(return_value=ServerTimeoutError("silence", url=server.url)))

    def bring_back(engine: Any) -> None:
        async def mark_up() -> None:
            for url in engine._pool.down():
                brought.append(url)
                engine._pool.mark_up(url)

        engine._run(mark_up())

    async def take_out() -> None:
        pool.mark_down(server.url, "it is silent.")

    engine._run(take_out())
    updater = SimpleNamespace(has_updated=True, take_out_forgetful=AsyncMock(), partial_update="")
    vars(engine).update(_updater=updater, reload_weights=bring_back)
    return engine, server, brought


@pytest.mark.parametrize("sign", ["silent", "stalled"])
def test_one_sglang_server_that_hangs_beside_others_is_started_again_with_the_weights(
    hanging_beside: tuple[Any, Any, list[str]], monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    engine, server, brought = hanging_beside
    if sign == "silent":
        engine._pool._heard[server.url] = -math.inf
    else:
        monkeypatch.setattr(engine._pool, "health_problem", AsyncMock(return_value=None))
        engine._pool._stalled.add(server.url)
    before = server.pid
    engine._bring_up_to_date()
    assert server.pid != before
    assert brought == [server.url]
    assert engine._pool.up() == (server.url, "http://b")
    assert engine.restarts_left == 0


def test_an_sglang_server_that_hung_waits_for_weights_as_a_new_one(
    hanging_beside: tuple[Any, Any, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server, _ = hanging_beside
    monkeypatch.setattr(engine._pool, "health_problem", AsyncMock(return_value=None))
    engine._pool._stalled.add(server.url)
    vars(engine).update(reload_weights=None, restarts_left=2)
    engine._revive()  # as an update does first
    before = server.pid
    assert not engine._revive(), "it is down, and has been silent and without a token only in its life before"
    assert server.pid == before
    assert engine._pool.up() == ("http://b",)


@pytest.mark.parametrize("is_silent", [False, True], ids=["for want of weights", "busy"])
def test_one_sglang_server_that_is_down_and_does_not_hang_is_left_alone(
    hanging_beside: tuple[Any, Any, list[str]], monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    engine, server, brought = hanging_beside
    if not is_silent:
        monkeypatch.setattr(engine._pool, "health_problem", AsyncMock(return_value=None))
    before = server.pid
    engine._bring_up_to_date()
    assert server.pid == before
    assert not server.death
    assert brought == []


def test_an_sglang_server_that_another_thread_starts_is_not_killed_when_the_last_one_begins_to_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It refuses connections until it is up. The sample of the one that hangs waits for it."""
    from dovetail.rollout.sglang import SGLangRollout

    servers = {url: Mock(url=url, death="") for url in ("http://a", "http://b")}
    engine = SGLangRollout.__new__(SGLangRollout)
    restarting, started = threading.Event(), threading.Event()

    def restart() -> None:
        with engine._restarting:
            restarting.set()
            assert started.wait(60)

    async def story() -> tuple[RemoteSample, float]:
        pool = InItsLoop(list(servers), cast("Any", None))
        problems = {url: ServerGoneError("no connection", url=url) for url in servers}
        monkeypatch.setattr(pool, "health_problem", AsyncMock(side_effect=problems.get))

        async def complete(url: str, sample: RemoteSample) -> Part:
            if url == "http://b":
                await asyncio.Event().wait()
            return Part([7], [-1.0], "stop")

        calls = SampleCalls(pool, cast("Any", SimpleNamespace(complete=complete)), engine._no_server)
        vars(engine).update(_pool=pool, _calls=calls, servers=servers, restarts_left=0, _restarting=threading.RLock())
        thread = threading.Thread(target=restart)
        thread.start()
        restarting.wait(60)
        pool.mark_down("http://a", "it died.")
        (sample,) = samples_of(GenerationRequest("x", [5], SamplingParams()), eos_ids=frozenset(), max_model_len=9)
        ended = asyncio.get_running_loop().create_future()
        await calls.start([sample], lambda _, error: ended.set_result(error))
        await asyncio.sleep(10)
        pool.mark_down("http://b", "it is silent.")
        await asyncio.sleep(100)
        pool.mark_up("http://a")
        started.set()
        thread.join()
        assert [url for url, server in servers.items() if server.kill.called] == []
        assert await ended is None
        return sample, asyncio.get_running_loop().time()

    sample, seconds = in_virtual_time(story())[0]
    assert sample.token_ids == [7]
    assert seconds < 115


def test_an_sglang_server_that_is_back_is_asked_again(hanging: tuple[Any, Any]) -> None:
    engine, server = hanging

    async def comes_back() -> None:
        engine._pool.mark_up(server.url)
        await engine._no_server(NoServerError("none is up"))

    engine._run(comes_back())
    assert not server.death


def test_a_vllm_actor_that_does_not_close_is_killed() -> None:
    from dovetail.rollout.vllm import ray_engine

    def get(call: Any, timeout: float) -> None:
        assert timeout <= 60
        raise RuntimeError("vLLM fails to close")

    killed: list[Any] = []
    engine = ray_engine.RayVLLMEngine.__new__(ray_engine.RayVLLMEngine)
    engine.actor = SimpleNamespace(call=SimpleNamespace(remote=lambda method: method))
    vars(engine).update(_ray=SimpleNamespace(get=get, kill=killed.append), _replacing=threading.RLock())
    with pytest.raises(RuntimeError, match="vLLM fails to close"):
        engine.close()
    assert killed == [engine.actor]
    engine.close()
