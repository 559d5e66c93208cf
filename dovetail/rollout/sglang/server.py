"""An SGLang server as a process on this machine, reached over HTTP on loopback.

Its port is bound here before it starts and stays bound: no two servers can race for one, and a server that is started
again is found under the same address. It ends with this process, however this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from dovetail.controller.rendezvous import LOOPBACK, hold_port
from dovetail.rollout.base import EngineError
from dovetail.rollout.sglang.environment import NEWEST, OLDEST, environment, how_to_install, supported_range
from dovetail.rollout.sglang.serve import WRONG_VERSION
from dovetail.rollout.sglang.settings import SGLangSettings

START_TIMEOUT_S = 900.0
_POLL_S = 0.25
_LAST_WORDS = 3000  # characters of the log that an error shows


class SGLangServer:
    """Starts at once; `wait_until_ready` before it is called. `python` is the program that has SGLang."""

    def __init__(self, settings: SGLangSettings, *, python: str, cpu: bool) -> None:
        self._ports = [hold_port(LOOPBACK), hold_port(LOOPBACK)]
        port, self.store_port = (holder.getsockname()[1] for holder in self._ports)
        self.url = f"http://{LOOPBACK}:{port}"
        arguments = settings.sglang_arguments(cpu=cpu) | {"port": port, "nccl_port": self.store_port}
        spec = {"arguments": arguments, "oldest": list(OLDEST), "newest": list(NEWEST), "fork": cpu}
        # -P: the folder of the program holds modules of ours that SGLang must not find before the real ones.
        self._command = [python, "-P", str(Path(__file__).with_name("serve.py")), json.dumps(spec)]
        self._environment = environment(cpu=cpu, raw_logprobs=settings.logprobs == "raw") | dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_for = ""
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def death(self) -> str:
        """Why the process is gone; empty while it lives."""
        if self._process is None:
            return "it was closed"
        code = self._process.poll()
        end = f"was killed: {self._killed_for}" if self._killed_for else f"ended with status {code}."
        return "" if code is None else f"the SGLang server {self.url} {end} {self._last_words()}"

    def start(self) -> None:
        """Also after its death."""
        self._end()
        handle, log = tempfile.mkstemp(prefix="dovetail-sglang-", suffix=".log")
        self.log = Path(log)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
                env=self._environment,
            )
        finally:
            os.close(handle)

    def wait_until_ready(self) -> None:
        """EngineError with the reason if it does not get there."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process is not None, "it was started"
            if self._process.poll() == WRONG_VERSION:
                raise EngineError(f"{supported_range()} {self._last_words()} {how_to_install()}")
            if self._process.poll() is not None:
                raise EngineError(f"the SGLang server did not start. {self._last_words()}")
            try:
                with opener.open(f"{self.url}/health", timeout=5.0):
                    return
            except OSError:
                time.sleep(_POLL_S)
        raise EngineError(f"the SGLang server was not ready after {START_TIMEOUT_S:.0f} s. {self._last_words()}")

    def kill(self, reason: str) -> None:
        """End it and the processes it has started: it hangs. It is one that died then."""
        assert self._process is not None, "it was started"
        self._killed_for = reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._end()
        for holder in self._ports:
            holder.close()

    def _end(self) -> None:
        if self._process is None:
            return
        self.kill("")
        process, self._process = self._process, None
        if process.stdin is not None:
            process.stdin.close()
        self.log.unlink(missing_ok=True)

    def _last_words(self) -> str:
        text = self.log.read_text(errors="replace")[-_LAST_WORDS:].strip() if self.log.exists() else ""
        return f"The end of its log:\n{text}" if text else "Its log is empty."
