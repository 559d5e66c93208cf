"""Tools of MCP servers, through the official `mcp` package (`pip install 'dovetail[mcp]'`).

A server is shared by all trajectories of the process. One that cannot be reached is infrastructure; it is connected
anew at the next attempt. What a tool reports as its own error is an observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from dovetail.agents.tools.functions import problem_of
from dovetail.agents.tools.observations import without_media
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import InfrastructureError, Message, OpenTools, Task, Toolbox, ToolCall, ToolResult

_LOST = (-32000, -32600, 32600)
"""Codes: the connection was closed; a server that was started anew does not know the session (mcp 2; mcp 1)."""
_HTTP_ERROR = "Server returned an error response"
"""What mcp 2 makes of HTTP 500 and the like; in mcp 1 they end the connection."""
_PING_S = 5.0
"""Between pings of the server while calls wait: over HTTP the library lets a call hang when the server dies
(https://github.com/modelcontextprotocol/python-sdk/issues/1577)."""


def read_servers(path: str) -> dict[str, Any]:
    """The servers of a file {"mcpServers": {name: {"command", "args", "env"} or {"url", "auth_token"}}}."""
    if not (file := Path(path).expanduser()).is_file():
        raise ToolError(f"The file of MCP servers {path} is not there.")
    content = json.loads(file.read_text())
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ToolError(f'{path} has no MCP servers; write {{"mcpServers": {{"name": {{"command": ...}}}}}}.')
    return servers


class McpToolbox(Toolbox):
    """The tools of several servers. Connects when the first trajectory begins."""

    def __init__(
        self, servers: Mapping[str, Any], *, selected: Collection[str] | None = None, connect_timeout_s: float = 60.0
    ) -> None:
        """`selected`: the tools to use; None: all."""
        _require_mcp()
        self._servers = [_Server(name, settings, connect_timeout_s) for name, settings in servers.items()]
        self._selected = selected

    async def open(self, task: Task, state: Any = None) -> tuple[OpenMcpTools, list[Message]]:
        by_name: dict[str, tuple[_Server, dict[str, Any]]] = {}
        for server in self._servers:
            for schema in await server.schemas():
                name = schema["function"]["name"]
                if self._selected is not None and name not in self._selected:
                    continue
                if name in by_name:
                    raise ToolError(f"Two MCP servers have a tool {name}; choose with tool_selected_list.")
                by_name[name] = (server, schema)
        if missing := set(self._selected or ()) - by_name.keys():
            raise ToolError(
                f"The MCP servers have no tool {', '.join(sorted(missing))}; they have {', '.join(by_name)}."
            )
        return OpenMcpTools(by_name), []

    async def close(self) -> None:
        for server in self._servers:
            await server.disconnect()


class OpenMcpTools(OpenTools):
    """Calls go to the server that has the tool. What a server remembers is its own."""

    def __init__(self, by_name: Mapping[str, tuple[_Server, dict[str, Any]]]) -> None:
        self._by_name = by_name
        self.schemas = [schema for _, schema in by_name.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        return problem_of(call, self._by_name) or await self._by_name[call.name][0].call(call)

    def state(self) -> Any:
        return {}


class _Server:
    """A connection, held by a task of its own: the library wants its contexts left in the task that entered them."""

    def __init__(self, name: str, settings: Mapping[str, Any], timeout_s: float) -> None:
        self._name, self._settings, self._timeout_s = name, settings, timeout_s
        self._lock = asyncio.Lock()
        self._stop = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._session: Any = None
        self._schemas: list[dict[str, Any]] = []
        self._num_waiting = 0

    async def schemas(self) -> list[dict[str, Any]]:
        await self._connected()
        return self._schemas

    async def call(self, call: ToolCall) -> ToolResult:
        session = await self._connected()
        try:
            result = await self._while_held(session.call_tool(call.name, call.arguments))
        except Exception as error:  # of the transport: what a tool raises comes as a result
            if _is_of_the_server(error):
                return ToolResult(f"Error: {call.name} failed: {error}", failure="exception")
            if session is self._session:  # else there is a new connection already
                await self.disconnect()
            raise InfrastructureError(f"the MCP server {self._name}: {type(error).__name__}: {error}") from error
        # By the names of the protocol, which the attributes of mcp 1 and mcp 2 spell differently.
        whole = result.model_dump(by_alias=True)
        text = "\n".join(part["text"] for part in whole["content"] if part["type"] == "text")
        result = without_media(call.name, text, [part["type"] for part in whole["content"] if part["type"] != "text"])
        return ToolResult(f"Error: {result.text}", failure="exception") if whole["isError"] else result

    async def _while_held(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, or an error when the connection ends before it."""
        assert self._holder is not None, "called by who has just connected"
        holder, calling = self._holder, asyncio.ensure_future(work)
        self._num_waiting += 1
        try:
            await asyncio.wait({calling, holder}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise ConnectionError("the connection ended")
            return calling.result()
        finally:
            self._num_waiting -= 1
            calling.cancel()

    async def disconnect(self) -> None:
        holder, self._holder, self._session = self._holder, None, None
        if holder is not None:
            self._stop.set()
            await asyncio.wait({holder}, timeout=self._timeout_s)  # `await holder` raises where it was cancelled
            holder.cancel()

    async def _connected(self) -> Any:
        async with self._lock:
            if self._session is None or self._holder is None or self._holder.done():
                await self.disconnect()
                self._stop = asyncio.Event()
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._holder = asyncio.create_task(self._hold(ready, self._stop))
                try:
                    self._session = await asyncio.wait_for(ready, self._timeout_s)
                except Exception as error:
                    raise InfrastructureError(f"no connection to the MCP server {self._name}: {_why(error)}") from error
                finally:
                    if self._session is None:  # also where the deadline of a call cancels this
                        self._holder.cancel()
            return self._session

    async def _hold(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        from mcp import ClientSession
        from mcp.types import PaginatedRequestParams

        try:
            async with _transport(self._settings) as streams, ClientSession(streams[0], streams[1]) as session:
                await session.initialize()
                page = (await session.list_tools()).model_dump(by_alias=True)
                tools = page["tools"]
                while cursor := page["nextCursor"]:
                    following = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                    page = following.model_dump(by_alias=True)
                    tools += page["tools"]
                self._schemas = [_schema(tool) for tool in tools]
                if not ready.done():
                    ready.set_result(session)
                watch = asyncio.create_task(self._watch(session, stop))
                try:
                    await stop.wait()
                finally:
                    watch.cancel()
        except Exception as error:  # noqa: BLE001  reported to whoever waits; later ones come with the next call
            if not ready.done():
                ready.set_exception(error)

    async def _watch(self, session: Any, stop: asyncio.Event) -> None:
        """End the connection once the server no longer knows it. One that cannot be reached ends it by itself."""
        while not stop.is_set():
            await asyncio.sleep(_PING_S)
            if self._num_waiting:
                try:
                    await session.send_ping()
                except Exception as error:  # noqa: BLE001  whatever else it is, the connection is of no more use
                    if not _is_of_the_server(error):
                        stop.set()


def _transport(settings: Mapping[str, Any]) -> Any:
    if "command" in settings:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        env = {**os.environ, **(settings.get("env") or {})}
        arguments = [str(argument) for argument in settings.get("args") or ()]
        return stdio_client(StdioServerParameters(command=settings["command"], args=arguments, env=env))
    if "url" not in settings:
        raise ToolError(f"An MCP server needs `command` or `url`, and has {', '.join(settings) or 'nothing'}.")
    headers = dict(settings.get("headers") or {})
    if token := settings.get("auth_token"):
        headers["Authorization"] = f"Bearer {token}"
    if settings.get("transport") == "sse" or str(settings["url"]).rstrip("/").endswith("/sse"):
        from mcp.client.sse import sse_client

        return sse_client(settings["url"], headers=headers)
    return _streamable_http(settings["url"], headers)


@contextlib.asynccontextmanager
async def _streamable_http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with (
        create_mcp_http_client(headers=headers) as client,
        streamable_http_client(url, http_client=client) as two,
    ):
        yield two


def _is_of_the_server(error: Exception) -> bool:
    """Whether it is what a server that is there says of a call."""
    import mcp

    kind = mcp.MCPError if hasattr(mcp, "MCPError") else mcp.McpError
    return isinstance(error, kind) and error.error.code not in _LOST and error.error.message != _HTTP_ERROR


def _why(error: BaseException) -> str:
    """The library's task groups hide what happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"] or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}


def _require_mcp() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ToolError("MCP servers need the package `mcp`: pip install 'dovetail[mcp]'.") from error
