"""Real vLLM OpenAI servers on this machine, one process tree each, started as docs/rollout.md says.

Their processes come from a fork server that has vLLM imported: four of them would import it for 60 CPU seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import dovetail
from dovetail.controller.rendezvous import LOOPBACK, hold_port
from dovetail.rollout.vllm.environment import environment
from tests.docs.commands import page_command
from tests.quick_python import quick_python
from tests.waiting import wait_until

READY_S = 280.0


class VLLMServer:
    """`wait` until it answers. `kill` as the kernel would, `stop` politely; both take the children along."""

    def __init__(self, folder: Path, log: Path, *, extended: bool = True, port: int | None = None) -> None:
        # Held while the server lives, so that nobody else is given it.
        self._python = quick_python("tests.rollout_vllm.preloaded")
        self._holder = hold_port(LOOPBACK) if port is None else None
        self.port = self._holder.getsockname()[1] if self._holder else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        written = page_command("rollout.md", "vllm.entrypoints.openai.api_server")
        places = {"python": self._python.path, "path/to/model": str(folder), "8000": str(self.port)}
        command = [places.get(word, word) for word in written.words]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
        command += ["--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
        command += ["--kv-cache-memory-bytes", str(64 << 20)]
        env = os.environ | environment(cpu=True, own_process=True)
        env["PYTHONPATH"] = str(Path(dovetail.__file__).parents[1])
        if extended:
            env |= written.environment
        else:
            at = command.index("--worker-extension-cls")
            del command[at : at + 2]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        wait_until(self._answers, f"the server; it wrote to {self.log}", seconds=READY_S)

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20):
                return True
        except OSError:
            return False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server itself, which leads a process group."""
        return self._python.forked_for(self.process.pid)

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> None:
        if self.is_alive:
            self.kill()
        if self._holder is not None:
            self._holder.close()
