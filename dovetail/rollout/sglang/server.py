"""An SGLang server as a process on this machine, reached over HTTP on loopback.

Its port is bound here before it starts and stays bound until it listens there itself: no two servers can race for one.
It ends with this process, however this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.rollout.base import EngineDiedError, EngineError
from dovetail.rollout.remote.client import HttpClient, ServerError, ServerGoneError
from dovetail.rollout.sglang.environment import NEWEST, OLDEST, environment, how_to_install, supported_range
from dovetail.rollout.sglang.link import RefusedError, Watch
from dovetail.rollout.sglang.serve import WRONG_VERSION
from dovetail.rollout.sglang.settings import SGLangSettings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 900.0
_POLL_S = 0.25
_LAST_WORDS = 3000  # characters of the log that an error shows
_READ_ONLY = frozenset(["/server_info", "/model_info"])


class ServerLink:
    """`start` it on the event loop that its calls will come from. `python` is the program that has SGLang."""

    def __init__(self, settings: SGLangSettings, client: HttpClient, *, python: str, cpu: bool) -> None:
        self._client = client
        self._ports = [_hold_port(), _hold_port()]
        port, self.store_port = (holder.getsockname()[1] for holder in self._ports)
        self.name = f"http://{LOOPBACK}:{port}"
        self.death = ""
        self._watch: Watch | None = None
        handle, log = tempfile.mkstemp(prefix="dovetail-sglang-", suffix=".log")
        self.log = Path(log)
        arguments = settings.sglang_arguments(cpu=cpu) | {"port": port, "nccl_port": self.store_port}
        spec = {"arguments": arguments, "oldest": list(OLDEST), "newest": list(NEWEST), "fork": cpu}
        own = environment(cpu=cpu, raw_logprobs=settings.logprobs == "raw")
        try:
            self._process = subprocess.Popen(
                # -P: the folder of the program holds modules of ours that SGLang must not find before the real ones.
                [python, "-P", str(Path(__file__).with_name("serve.py")), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
                env=own | dict(os.environ),
            )
        finally:
            os.close(handle)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        self._watch = Watch(self._look)
        try:
            await self._watch.unless_dead(asyncio.wait_for(self._ready(), START_TIMEOUT_S))
        except TimeoutError:
            waited = f"the SGLang server was not ready after {START_TIMEOUT_S:.0f} s."
            raise EngineError(f"{waited} {self._last_words()}") from None
        except EngineDiedError:
            if self._process.returncode == WRONG_VERSION:
                raise EngineError(f"{supported_range()} {self._last_words()} {how_to_install()}") from None
            raise EngineError(f"the SGLang server did not start. {self._last_words()}") from None
        finally:
            for holder in self._ports:
                holder.close()

    async def call(self, route: str, body: Mapping[str, Any]) -> Any:
        assert self._watch is not None, "start() comes first"
        try:
            if route in _READ_ONLY:
                return await self._watch.unless_dead(self._client.get(self.name + route, timeout_s=None))
            return await self._watch.unless_dead(self._client.post(self.name + route, dict(body), timeout_s=None))
        except ServerGoneError as error:
            # Connections break a moment before the process is gone, and only its end says why.
            await asyncio.sleep(4 * _POLL_S)
            self.death = self.death or f"the SGLang server {self.name} broke its connections: {error}"
            raise EngineDiedError(self._look() or self.death) from error
        except ServerError as error:
            raise RefusedError(f"SGLang refused {route}: {error}") from error

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.death = self.death or "it was closed"
        self.kill()
        self.log.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the server and the processes it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for holder in self._ports:
            holder.close()

    async def _ready(self) -> None:
        while True:
            try:
                await self._client.get(f"{self.name}/health", timeout_s=5.0)
            except ServerError:
                await asyncio.sleep(_POLL_S)
            else:
                return

    def _look(self) -> str:
        code = self._process.poll()
        if code is not None and not self.death:
            self.death = f"the SGLang server {self.name} ended with status {code}. {self._last_words()}"
        return self.death

    def _last_words(self) -> str:
        text = self.log.read_text(errors="replace")[-_LAST_WORDS:].strip() if self.log.exists() else ""
        return f"Its last words:\n{text}" if text else "It left no words."


def _hold_port() -> socket.socket:
    """A port that is bound and does not listen: nobody else is given it, and a server that asks for it gets it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, 0))
    return holder
