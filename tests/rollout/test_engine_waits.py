"""Engines that stop answering: each wait for one ends with its name, and the task that looks at servers survives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.controller.cluster import _forbid_network
from dovetail.observability.waits import WaitTimeout
from dovetail.rollout.base import EngineDiedError
from dovetail.rollout.remote import calls as remote_calls
from dovetail.rollout.remote.client import ServerGoneError
from dovetail.rollout.remote.pool import ServerPool

pytestmark = pytest.mark.unit


def test_a_look_that_fails_does_not_end_the_watch_over_the_servers() -> None:
    class Client:
        num_looks = 0

        async def get(self, url: str, timeout_s: float | None = None) -> None:
            self.num_looks += 1
            if self.num_looks == 1:
                raise ValueError("a bug in a health check")
            raise ServerGoneError("nobody is there", url=url)

    async def watch() -> dict[str, str]:
        client: Any = Client()
        pool = ServerPool(["http://a"], client, interval_s=0.001)
        pool.start()
        await _until(lambda: bool(pool.router.down()))
        await pool.close()
        return pool.router.down()

    assert "nobody is there" in asyncio.run(watch())["http://a"]


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


def test_a_vllm_actor_that_writes_no_token_is_dead_unless_it_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_network()  # the module imports ray, which must not listen on the network afterwards
    from dovetail.rollout.vllm import ray_engine

    monkeypatch.setattr(ray_engine, "SILENCE_S", 0.05)
    num_looks = 0

    def no_token(seconds: float) -> ray_engine.Progress:
        nonlocal num_looks
        num_looks += 1
        return ray_engine.Progress([], num_tokens=5, paused=num_looks <= 200)

    def give_up(error: EngineDiedError) -> None:
        raise error

    engine = ray_engine.RayVLLMEngine.__new__(ray_engine.RayVLLMEngine)
    engine._taking = threading.Lock()
    running: Any = {"a": None}
    engine._running = running
    monkeypatch.setattr(engine, "_take", no_token)
    monkeypatch.setattr(engine, "_replace", give_up)
    with pytest.raises(EngineDiedError, match="the vLLM engine hangs: this worker waits for 1 requests"):
        engine.wait(lambda: False)
    assert num_looks > 200, "as long as it is paused it owes no token"


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)
