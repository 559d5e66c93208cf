"""MCP servers: a stand-in that fails on demand, and the official package in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dovetail.agents import InfrastructureError, Task
from dovetail.agents.tools.mcp import McpToolbox, read_servers
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import ToolCall
from tests.waiting import wait_in_loop

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Error(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.error = SimpleNamespace(code=code, message="")


class Dumped(dict[str, Any]):
    """A result of the library."""

    def model_dump(self, *, by_alias: bool) -> dict[str, Any]:
        return dict(self)


class Servers:
    """What the stand-in does, and what was asked of it."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.tasks: list[Any] = []
        self.down = self.hangs = False
        self.late = asyncio.Event()

    @contextlib.asynccontextmanager
    async def connect(self, *settings: Any, **more: Any) -> AsyncIterator[tuple[Any, Any]]:
        if self.down:
            raise ConnectionRefusedError("nobody is there")
        if self.hangs:
            await asyncio.sleep(3600)
        self.started.append((settings, more))
        entered = asyncio.current_task()
        yield None, None
        assert asyncio.current_task() is entered, "left in another task"

    def session(self) -> type:
        servers = self

        class ClientSession:
            def __init__(self, read: Any, write: Any) -> None: ...

            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *error: Any) -> None: ...

            async def initialize(self) -> None: ...

            async def list_tools(self, params: Any = None) -> Any:
                """One on each page."""
                name, following = ("tell", "2") if params is None else ("ask", None)
                return Dumped(
                    tools=[{"name": name, "description": "Tell.", "inputSchema": SCHEMA}], nextCursor=following
                )

            async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
                match arguments["city"]:
                    case "closed":
                        raise Error(-32000)
                    case "wrong":
                        raise Error(-32602)
                    case "broken":
                        raise BrokenPipeError("pipe")
                    case "late":
                        servers.late = asyncio.Event()
                        await servers.late.wait()
                        raise Error(-32000)
                parts = [{"type": "text", "text": f"{name} {arguments['city']}"}, {"type": "image"}]
                return Dumped(content=parts, isError=arguments["city"] == "nowhere")

        return ClientSession


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    modules = {name: ModuleType(name) for name in ("mcp", "mcp.client", "mcp.client.stdio", "mcp.types")}
    vars(modules["mcp"]).update(ClientSession=made.session(), McpError=Error, StdioServerParameters=SimpleNamespace)
    vars(modules["mcp.types"]).update(PaginatedRequestParams=SimpleNamespace)
    vars(modules["mcp.client.stdio"]).update(stdio_client=made.connect)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def call(toolbox: McpToolbox, *cities: str) -> list[Any]:
    async def run() -> list[Any]:
        tools, _ = await toolbox.open(Task([]))
        results: list[Any] = []
        for city in cities:
            try:
                results.append((await tools.call(ToolCall("tell", {"city": city}))).text)
            except InfrastructureError as error:
                results.append(error)
        await toolbox.close()
        return [tools.schemas, *results]

    return asyncio.run(run())


COMMAND = {"weather": {"command": "server", "args": ["--port", 1], "env": {"KEY": "x"}}}


NOT_SHOWN = "Error: the image that tell returned cannot be shown; only text can."


def test_tools_of_a_server_are_called_over_one_connection(servers: Servers) -> None:
    schemas, *texts = call(McpToolbox(COMMAND), "Oslo", "nowhere", "wrong")
    assert [schema["function"]["name"] for schema in schemas] == ["tell", "ask"]
    assert schemas[0] == {
        "type": "function",
        "function": {"name": "tell", "description": "Tell.", "parameters": SCHEMA},
    }
    assert texts == [
        f"tell Oslo\n{NOT_SHOWN}",
        f"Error: tell nowhere\n{NOT_SHOWN}",
        "Error: tell failed: code -32602",
    ]
    ((parameters,), _), *more = servers.started
    assert not more
    assert (parameters.command, parameters.args, parameters.env["KEY"]) == ("server", ["--port", "1"], "x")


@pytest.mark.parametrize("fault", ["closed", "broken"])
def test_a_lost_connection_is_infrastructure_and_is_made_anew(servers: Servers, fault: str) -> None:
    _, lost, again = call(McpToolbox(COMMAND), fault, "Oslo")
    assert isinstance(lost, InfrastructureError)
    assert again.startswith("tell Oslo")
    assert len(servers.started) == 2


def test_a_call_that_learns_late_of_a_lost_connection_leaves_the_new_one_alone(servers: Servers) -> None:
    async def run() -> list[str]:
        toolbox = McpToolbox(COMMAND)
        tools, _ = await toolbox.open(Task([]))
        late = asyncio.ensure_future(tools.call(ToolCall("tell", {"city": "late"})))
        await asyncio.sleep(0)
        results = []
        for city in ("closed", "Oslo"):
            with contextlib.suppress(InfrastructureError):
                results.append((await tools.call(ToolCall("tell", {"city": city}))).text)
        servers.late.set()
        with pytest.raises(InfrastructureError):
            await late
        results.append((await tools.call(ToolCall("tell", {"city": "Bonn"}))).failure)
        results.append((await tools.call(ToolCall("tell", {"city": "nowhere"}))).failure)
        await toolbox.close()
        return results

    assert asyncio.run(run()) == [
        f"tell Oslo\n{NOT_SHOWN}",
        "not shown",
        "exception",
    ]
    assert len(servers.started) == 2


def test_a_server_that_is_not_there_is_infrastructure(servers: Servers) -> None:
    servers.down = True
    with pytest.raises(InfrastructureError, match="no connection to the MCP server weather: nobody is there"):
        call(McpToolbox(COMMAND))


def test_a_connection_that_was_given_up_is_made_anew(servers: Servers) -> None:
    async def run() -> str:
        toolbox = McpToolbox(COMMAND, connect_timeout_s=0.05)
        servers.hangs = True
        with pytest.raises(InfrastructureError, match="no connection to the MCP server weather: TimeoutError"):
            await toolbox.open(Task([]))
        servers.hangs = False
        tools, _ = await toolbox.open(Task([]))
        result = await tools.call(ToolCall("tell", {"city": "Oslo"}))
        await toolbox.close()
        return result.text

    assert asyncio.run(run()).startswith("tell Oslo")


def test_tools_are_selected_by_name(servers: Servers) -> None:
    assert len(call(McpToolbox(COMMAND, selected=["tell"]))[0]) == 1
    with pytest.raises(ToolError, match="have no tool look; they have tell"):
        call(McpToolbox(COMMAND, selected=["tell", "look"]))
    with pytest.raises(ToolError, match="Two MCP servers have a tool tell"):
        call(McpToolbox({**COMMAND, "second": COMMAND["weather"]}))


def test_servers_are_read_from_their_json(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": COMMAND}))
    assert read_servers(str(file)) == COMMAND
    file.write_text("{}")
    with pytest.raises(ToolError, match="has no MCP servers"):
        read_servers(str(file))


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)  # importing it raises
    with pytest.raises(ToolError, match=r"pip install 'dovetail\[mcp\]'"):
        McpToolbox(COMMAND)


needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="mcp is not installed: pip install 'dovetail[mcp]'"
)
SERVER = """
import os, sys
try:  # mcp 2
    from mcp.server.mcpserver import Context, MCPServer
except ImportError:
    from mcp.server.fastmcp import Context, FastMCP as MCPServer

transport, port = sys.argv[1:]
server = MCPServer("weather", log_level="ERROR")
is_busy = False


@server.tool()
def tell(city: str, context: Context) -> str:
    global is_busy
    is_busy = city == "crowded"
    if city == "nowhere":
        raise ValueError("no such city")
    if city == "closed":
        os._exit(3)
    request = context.request_context.request
    return f"sun in {city}" if request is None else f"sun in {city} for {request.headers['authorization']}"


if transport == "stdio":
    server.run()
else:
    import uvicorn

    app = server.sse_app() if transport == "sse" else server.streamable_http_app()

    async def gateway(scope, receive, send):
        global is_busy
        if is_busy and scope["method"] == "POST":
            is_busy = False
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await app(scope, receive, send)

    uvicorn.run(gateway, port=int(port), log_level="error")
"""


@needs_mcp
def test_a_server_of_the_official_package_is_called_lost_and_found_again(tmp_path: Path) -> None:
    """In a process of its own, over its standard input and output."""
    (tmp_path / "server.py").write_text(SERVER)
    arguments = [str(tmp_path / "server.py"), "stdio", 0]
    toolbox = McpToolbox({"weather": {"command": sys.executable, "args": arguments}})
    schemas, first, refused, lost, again = call(toolbox, "Oslo", "nowhere", "closed", "Bonn")
    assert [schema["function"]["name"] for schema in schemas] == ["tell"]
    assert schemas[0]["function"]["parameters"]["required"] == ["city"]
    assert (first, again) == ("sun in Oslo", "sun in Bonn")
    assert refused.startswith("Error: Error executing tool tell")  # the rest is between the tool and its server
    assert isinstance(lost, InfrastructureError)


@needs_mcp
@pytest.mark.parametrize(("transport", "path"), [("streamable-http", "mcp"), ("sse", "sse")])
def test_a_server_at_an_address_that_dies_or_is_too_busy_is_infrastructure_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, path: str
) -> None:
    """The library's client of streamable HTTP would wait for ever for the answer to the call that killed the server."""
    monkeypatch.setattr("dovetail.agents.tools.mcp._PING_S", 0.2)
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def listens(process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, "the server ended at its start"
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", port)) == 0

    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), transport, str(port)])
        try:
            await wait_in_loop(lambda: listens(process), "a server that listens")
            yield
        finally:
            process.kill()
            process.wait()

    async def run() -> list[Any]:
        settings = {"url": f"http://127.0.0.1:{port}/{path}", "auth_token": "key"}
        toolbox, results = McpToolbox({"weather": settings}), []

        async def tell(city: str) -> None:
            try:
                results.append((await asyncio.wait_for(tools.call(ToolCall("tell", {"city": city})), 20)).text)
            except InfrastructureError as error:
                results.append(type(error))

        async with serving():
            tools, _ = await toolbox.open(Task([]))
            for city in ("Oslo", "nowhere", "crowded", "Bonn", "Bonn", "closed", "Bonn"):
                await tell(city)
        async with serving():
            await tell("Oslo")
        async with serving():  # nobody called while it was away
            for city in ("Oslo", "Bonn"):
                await tell(city)
        await toolbox.close()
        return results

    crowded, oslo, bonn = (f"sun in {city} for Bearer key" for city in ("crowded", "Oslo", "Bonn"))
    lost = InfrastructureError
    first, refused, *others = asyncio.run(run())
    assert refused.startswith("Error: Error executing tool tell")
    assert [first, *others] == [oslo, crowded, lost, bonn, lost, lost, oslo, lost, bonn]
