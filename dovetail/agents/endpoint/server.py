"""An HTTP server on this machine with one address and one key for each trajectory. Drives nothing: clients do.

`POST /sessions/<id>/v1/chat/completions` is a turn, and so is `/v1/messages` in Anthropic's form; `POST
/sessions/<id>/finish` is the end. The same request again, by a client that did not get its answer, gets the answer that
was given: a turn is sampled once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast, get_args
from weakref import WeakKeyDictionary

from aiohttp import web

from dovetail.agents.chat import ChatTemplateError
from dovetail.agents.endpoint.anthropic import chat_body, message_events, message_of
from dovetail.agents.endpoint.openai import (
    MODEL,
    BadRequestError,
    ChatRequest,
    chunks,
    completion,
    error_body,
    read_request,
)
from dovetail.agents.session import Session, TrajectoryEnd
from dovetail.agents.types import InfrastructureError, Outcome

_MAX_BODY = 64 << 20
_RETRIES = "X-Stainless-Retry-Count"
"""OpenAI's clients send it: 0 for a new request, above for the same one again."""


class Finish(NamedTuple):
    """How the agent says that it ended."""

    reward: float | None
    outcome: Outcome


@dataclass(slots=True)
class _Answer:
    """What came, or will come, of a request."""

    work: asyncio.Task[dict[str, Any]]
    delivered_to: Any = None
    """The connection that it was written to. Who asks again there has read it."""


@dataclass(slots=True)
class OpenSession:
    """A trajectory that can be reached."""

    name: str
    session: Session
    url: str
    """Without /v1: `finish` is posted here."""
    idle_timeout_s: float
    api_key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    ended: asyncio.Future[Finish] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """What the agent posted at its end, or the exception that ended the trajectory."""
    answers: dict[str, _Answer] = field(default_factory=dict)
    num_running: int = 0
    idle: asyncio.TimerHandle | None = None

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take."""
        return f"{self.url}/v1"

    def end(self, result: Finish | BaseException) -> None:
        """The first end holds."""
        if self.ended.done():
            return
        if isinstance(result, BaseException):
            self.ended.set_exception(result)
        else:
            self.ended.set_result(result)

    def watch(self, change: int) -> None:
        """Count requests that run; end the session when there was none for too long."""
        self.num_running += change
        if self.idle is not None:
            self.idle.cancel()
        if not self.num_running:
            words = f"the agent asked for nothing in {self.idle_timeout_s:g} s and did not post its end"
            loop = asyncio.get_running_loop()
            self.idle = loop.call_later(self.idle_timeout_s, self.end, InfrastructureError(words))


class Endpoint:
    """The server of all sessions of one event loop. It listens while there are any."""

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint]] = WeakKeyDictionary()

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._sessions: dict[str, OpenSession] = {}
        self._runner: web.AppRunner | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of_loop(cls) -> Endpoint:
        """The one of the running event loop."""
        return cls._of_loop.setdefault(asyncio.get_running_loop(), cls())

    @contextlib.asynccontextmanager
    async def open(self, session: Session, *, idle_timeout_s: float = 600.0) -> AsyncIterator[OpenSession]:
        """An address and a key for the session, as long as the block lasts."""
        name = secrets.token_hex(8)
        async with self._lock:
            address = await self._listen()
            opened = OpenSession(name, session, f"http://{address}/sessions/{name}", idle_timeout_s)
            self._sessions[name] = opened
        opened.watch(0)
        try:
            yield opened
        finally:
            if opened.idle is not None:
                opened.idle.cancel()
            if opened.ended.done() and not opened.ended.cancelled():
                opened.ended.exception()  # looked at: an end that nobody waited for is no error
            opened.ended.cancel()
            for answer in opened.answers.values():
                answer.work.cancel()
            del self._sessions[name]
            async with self._lock:
                if not self._sessions:
                    await self._stop()

    async def _listen(self) -> str:
        if self._runner is None:
            app = web.Application(client_max_size=_MAX_BODY)
            app.router.add_post("/sessions/{name}/v1/chat/completions", self._chat)
            app.router.add_post("/sessions/{name}/v1/messages", self._chat)
            app.router.add_get("/sessions/{name}/v1/models", self._models)
            app.router.add_post("/sessions/{name}/finish", self._finish)
            # Clients keep connections open; those of a session that is over need not be waited for.
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            try:
                await self._runner.setup()
                await web.TCPSite(self._runner, self._host, self._port).start()
            except BaseException:
                await self._stop()
                raise
        host, port = self._runner.addresses[0][:2]
        return f"{host}:{port}"

    async def _stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # ---- requests ----

    def _opened(self, request: web.Request) -> OpenSession:
        opened = self._sessions.get(request.match_info["name"])
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if opened is None or not secrets.compare_digest(key.encode(), opened.api_key.encode()):
            raise web.HTTPUnauthorized(
                text=json.dumps(error_body("no such session, or another key than its own", kind="invalid_api_key")),
                content_type="application/json",
            )
        return opened

    async def _models(self, request: web.Request) -> web.Response:
        self._opened(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "dovetail"}]})

    async def _finish(self, request: web.Request) -> web.Response:
        opened = self._opened(request)
        try:
            body = await request.json() if request.can_read_body else {}
            reward, outcome = body.get("reward"), body.get("outcome", "finished")
            finish = Finish(None if reward is None else float(reward), cast("Outcome", outcome))
            if reward is not None and not math.isfinite(finish.reward or 0.0):
                raise ValueError(f"reward={reward} is no finite number")
        except (ValueError, TypeError, AttributeError) as error:
            return _refusal(400, f'the body must be {{"reward": number, "outcome": name}}: {error}')
        if outcome not in get_args(Outcome):
            return _refusal(400, f"outcome={outcome!r} must be one of {', '.join(get_args(Outcome))}.")
        opened.end(finish)
        return web.json_response({"ok": True})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        opened = self._opened(request)
        opened.watch(+1)
        try:
            return await self._answered(request, opened)
        finally:
            opened.watch(-1)

    async def _answered(self, request: web.Request, opened: OpenSession) -> web.StreamResponse:
        is_anthropic = request.path.endswith("/messages")
        try:
            body = await request.json()
            chat = read_request(chat_body(body) if is_anthropic else body)
        except BadRequestError as error:
            return _refusal(400, str(error), param=error.param)
        except ValueError as error:
            return _refusal(400, f"the body is not JSON: {error}")
        except (KeyError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            return _refusal(400, f"a message, a block or a tool is not as the API has it: {why}.", param="messages")
        if opened.ended.done():
            return _refusal(400, "the trajectory is over", code="trajectory_over")
        answer = opened.answers.get(chat.key)
        if answer is None or not _is_retry(request, answer):
            work = asyncio.ensure_future(_turn(opened, chat))
            answer = opened.answers[chat.key] = _Answer(work)
        try:
            whole = await asyncio.shield(answer.work)
        except TrajectoryEnd as end:
            opened.end(end)
            code = "context_length_exceeded" if end.outcome == "length" else "trajectory_over"
            return _refusal(400, f"the trajectory is over: {end.outcome}", code=code)
        except ChatTemplateError as error:
            opened.answers.pop(chat.key, None)
            return _refusal(400, str(error), param="messages")
        except Exception as error:  # noqa: BLE001 - the loop that waits for the end raises it
            opened.end(error)
            return _refusal(400, f"the engine failed: {type(error).__name__}: {error}", code="trajectory_over")
        sent = message_of(whole) if is_anthropic else whole
        response = web.StreamResponse() if chat.stream else web.json_response(sent)
        events = message_events(sent) if is_anthropic else chunks(whole, usage=chat.stream_usage)
        with contextlib.suppress(ConnectionError):  # the client will ask again
            await _send(request, response, events if chat.stream else ())
            answer.delivered_to = request.get_extra_info("peername")
        return response


async def _turn(opened: OpenSession, chat: ChatRequest) -> dict[str, Any]:
    turn = await opened.session.chat(chat.messages, tools=chat.tools, max_new_tokens=chat.max_tokens, stop=chat.stop)
    return completion(turn, chat, opened.name)


def _is_retry(request: web.Request, answer: _Answer) -> bool:
    """Whether this is the request that was answered before, and not one for another sample."""
    if (count := request.headers.get(_RETRIES)) is not None:
        return count != "0"
    return answer.delivered_to is None or answer.delivered_to != request.get_extra_info("peername")


async def _send(request: web.Request, response: web.StreamResponse, events: Iterable[str]) -> None:
    """Written here and not by the framework, so that a connection that is gone is noticed."""
    if events:
        response.headers.update({"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()


def _refusal(status: int, message: str, *, param: str | None = None, code: str | None = None) -> web.Response:
    # Not 5xx and not 409: clients would try again.
    return web.json_response(error_body(message, kind="invalid_request_error", param=param, code=code), status=status)
