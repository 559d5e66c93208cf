"""JSON over HTTP to engine servers. Every failure names the URL, the status and what the server answered.

Nothing that may have reached the server is sent twice here: only a connection that could not be made is tried again.
Whoever knows that a call is harmless when repeated repeats it (`pool.py` does so for generation).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

from dovetail.rollout.base import EngineError

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5.0
_CONNECT_PAUSES_S = (0.1, 0.4)
# Servers close a connection that was idle for 5 s (uvicorn); one that is older is not used again, so that no call
# meets a connection that is just being closed.
_KEEPALIVE_S = 2.0
_MAX_BODY_SHOWN = 600


class ServerError(EngineError):
    """A server answered with an error. `status` is 0 when it gave no answer at all."""

    def __init__(self, message: str, *, url: str, status: int = 0, body: str = "") -> None:
        super().__init__(message)
        self.url = url
        self.status = status
        self.body = body


class ServerGoneError(ServerError):
    """The connection failed or broke: the server may be gone, and what it was doing is lost."""


class ServerTimeoutError(ServerError):
    """No answer within the time given."""


async def ask_each(calls: Iterable[Awaitable[T]]) -> list[T | ServerError]:
    """What all of them answer, or the ServerError of those that failed. Any other error is raised after the last."""
    answers: list[T | ServerError] = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
            raise answer
        answers.append(answer)
    return answers


class HttpClient:
    """Use from one event loop only; `close` it there. Proxies of the environment are not used: servers are peers."""

    def __init__(self, *, api_key: str | None = None) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: Any = None

    async def get(self, url: str, *, timeout_s: float | None = 30.0) -> Any:
        """The decoded answer: JSON, or text where it is none, None where it is empty."""
        return await self._request("GET", url, timeout_s)

    async def post(
        self,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = 60.0,
    ) -> Any:
        """As `get`. `timeout_s=None` waits for as long as it takes."""
        return await self._request("POST", url, timeout_s, json=body, params=query)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, url: str, timeout_s: float | None, **payload: Any) -> Any:
        aiohttp = _aiohttp()
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        for pause in (*_CONNECT_PAUSES_S, None):
            try:
                async with self._open().request(
                    method, url, headers=self._headers, timeout=timeout, **payload
                ) as response:
                    text = await response.text(errors="replace")
                    if response.status >= 400:
                        raise _refused(method, url, response.status, text)
                    return _decoded(text)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                # Nothing was sent: there was no connection to send it on.
                if pause is None or isinstance(error, aiohttp.ConnectionTimeoutError):
                    raise ServerGoneError(f"{method} {url}: no connection ({_words(error)}).", url=url) from error
                await asyncio.sleep(pause)
            except TimeoutError as error:
                raise ServerTimeoutError(f"{method} {url}: no answer within {timeout_s} s.", url=url) from error
            except aiohttp.InvalidURL as error:
                raise ValueError(f"{url!r} is no URL; write http://host:port.") from error
            except (aiohttp.ClientError, ConnectionError) as error:
                raise ServerGoneError(
                    f"{method} {url}: the connection broke before the answer was complete ({_words(error)}).", url=url
                ) from error
        raise AssertionError("the last round returns or raises")

    def _open(self) -> Any:
        if self._session is None:
            aiohttp = _aiohttp()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


def _refused(method: str, url: str, status: int, text: str) -> ServerError:
    shown = text.strip()[:_MAX_BODY_SHOWN] or "(an empty answer)"
    return ServerError(f"{method} {url} answered HTTP {status}: {shown}", url=url, status=status, body=text)


def _decoded(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError("rollout.mode=server needs the library aiohttp: pip install 'dovetail[remote]'.") from error
    return aiohttp
