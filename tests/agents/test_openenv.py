"""OpenEnv's protocol over a WebSocket and over HTTP, with the faults of its servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from dovetail.agents import InfrastructureError, Task, ToolResult
from dovetail.agents.environments import Environments
from dovetail.agents.openenv import OpenEnv

pytestmark = pytest.mark.unit


class Echo:
    """A server that repeats, and breaks down in the way that an action names."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def reset(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        return web.json_response({"observation": {"text": "Say it."}, "reward": None, "done": False})

    async def step(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        match body["action"].get("say"):
            case "500":
                return web.Response(status=500, text="out of order")
            case "bad":
                return web.Response(text="<html>")
            case "list":
                return web.json_response([1])
            case "hang":
                await asyncio.Event().wait()
            case "what":
                return web.Response(status=422, text="say something else")
        return web.json_response({"observation": {"text": body["action"]["say"]}, "reward": 1, "done": True})

    async def socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            body = json.loads(message.data)
            self.requests.append(body)
            match body["data"].get("say"):
                case "gone":
                    await socket.close()
                case "bad":
                    await socket.send_str("{")
                case "hang":
                    await asyncio.Event().wait()
                case "what" | "FACTORY_ERROR" as code:
                    code = "VALIDATION_ERROR" if code == "what" else code
                    await socket.send_json({"type": "error", "data": {"code": code, "message": "no such thing"}})
                case said:
                    observation = {"text": said or "Say it."}
                    data = {"observation": observation, "reward": 1.0 if said else None, "done": bool(said)}
                    await socket.send_json({"type": "observation", "data": data})
        return socket


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, Echo]]:
    """The address of a server, and the server."""
    echo = Echo()
    app = web.Application()
    app.add_routes([web.post("/reset", echo.reset), web.post("/step", echo.step), web.get("/ws", echo.socket)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}", echo
    finally:
        await runner.cleanup()


async def play(scheme: str, say: str, timeout_s: float = 60.0) -> tuple[ToolResult, list[Any]]:
    async with serving() as (address, echo):
        make = lambda: OpenEnv(  # noqa: E731
            f"{scheme}://{address}", action_key="say", observation_key="text", timeout_s=timeout_s, level=2
        )
        environment, messages = await Environments(make).open(Task([], seed=5))
        assert messages == [{"role": "user", "content": "Say it."}]
        try:
            return await environment.respond([{"role": "assistant", "content": say}]), echo.requests
        finally:
            await environment.close()


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_the_models_text_is_the_action(scheme: str) -> None:
    result, requests = await play(scheme, "hello")
    assert result == ToolResult("hello", 1.0, True)
    reset, step = [request.get("data", request) for request in requests]
    assert (reset["seed"], reset["level"]) == (5, 2)
    assert step.get("action", step) == {"say": "hello"}


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_an_action_that_the_server_refuses_is_an_observation(scheme: str) -> None:
    assert (await play(scheme, "what"))[0].text.startswith("Error: the action was refused: ")


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [("http", "500"), ("http", "bad"), ("http", "list"), ("ws", "gone"), ("ws", "bad"), ("ws", "FACTORY_ERROR")],
)
async def test_a_server_that_is_out_of_order_is_infrastructure(scheme: str, fault: str) -> None:
    with pytest.raises(InfrastructureError, match=r"the environment (ws|http)://127\.0\.0\.1"):
        await play(scheme, fault)


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_a_server_that_does_not_answer_is_infrastructure(scheme: str) -> None:
    with pytest.raises(InfrastructureError, match="did not step: TimeoutError"):
        await play(scheme, "hang", timeout_s=2.0)


async def test_a_step_that_is_sent_again_is_the_same_one_to_the_server() -> None:
    async with serving() as (address, echo):
        make = lambda: OpenEnv(f"http://{address}", action_key="say")  # noqa: E731
        environment, _ = await Environments(make).open(Task([]))
        for say in ("500", "500", "hello", "more"):
            with contextlib.suppress(InfrastructureError):
                await environment.respond([{"role": "assistant", "content": say}])
        await environment.close()
        first, again, third, fourth = [request["request_id"] for request in echo.requests[1:]]
        assert first == again == third != fourth


async def test_a_late_reply_is_not_that_to_the_next_action() -> None:
    async with serving() as (address, _):
        environment = OpenEnv(f"ws://{address}", action_key="say", timeout_s=1.0)
        await environment.reset(Task([]))
        with pytest.raises(InfrastructureError, match="TimeoutError"):
            await environment.step("hang")
        with pytest.raises(InfrastructureError, match="its session is gone"):
            await environment.step("hello")
        await environment.close()


async def test_a_lost_session_is_not_begun_anew() -> None:
    async with serving() as (address, _):
        make = lambda: OpenEnv(f"ws://{address}", action_key="say")  # noqa: E731
        environment, _ = await Environments(make).open(Task([]))
        for say in ("gone", "hello"):
            with pytest.raises(InfrastructureError):
                await environment.respond([{"role": "assistant", "content": say}])
        await environment.close()


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_a_server_that_is_not_there_is_infrastructure(scheme: str) -> None:
    toolbox = Environments(lambda: OpenEnv(f"{scheme}://127.0.0.1:1"))
    with pytest.raises(InfrastructureError, match="did not reset"):
        await toolbox.open(Task([]))
