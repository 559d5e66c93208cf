"""Real SGLang, in the form this environment can run it.

Where SGLang is installed (`make sglang-env`) the engine runs in the test's own process. Where it is not, servers are
started with the Python that DOVETAIL_SGLANG_PYTHON names, as a trainer would; without that there is no SGLang to test,
and only what needs none is collected. `make test` does both. Engines are started once: each costs seconds of imports.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.rollout.base import EngineError, GenerationRequest, GenerationResult
from dovetail.rollout.sglang import SGLangRollout, SGLangSettings
from dovetail.rollout.sglang.environment import PYTHON_VARIABLE
from tests.models.tiny import save_tiny_model

IN_PROCESS = importlib.util.find_spec("sglang") is not None
_SERVERS_ONLY = ["test_with_servers.py", "test_smollm2.py", "test_sharded.py", "test_training_run.py"]
_NEEDS_SGLANG = ["test_engine.py", "test_weight_updates.py", "test_within_process.py"]

if IN_PROCESS:
    collect_ignore = _SERVERS_ONLY
elif PYTHON_VARIABLE in os.environ:
    collect_ignore = ["test_within_process.py"]
else:
    collect_ignore = _SERVERS_ONLY + _NEEDS_SGLANG


def small_settings(folder: Path | str, **overrides: Any) -> SGLangSettings:
    defaults = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 512}
    kwargs = {"max_total_tokens": 4096}
    return SGLangSettings(str(folder), **{**defaults, "engine_kwargs": kwargs, **overrides})


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama_tied", tmp_path_factory.mktemp("models") / "llama_tied")


@pytest.fixture(scope="package")
def engine(tiny_folder: Path) -> Iterator[SGLangRollout]:
    """Of a model with tied embeddings; in this process, or two servers behind the router."""
    settings = small_settings(tiny_folder)
    with SGLangRollout(settings, num_servers=0 if IN_PROCESS else 2, bucket_bytes=1 << 18) as built:
        yield built


class Running:
    """A generation on a thread."""

    def __init__(self, engine: SGLangRollout, requests: Sequence[GenerationRequest]) -> None:
        self.results: list[GenerationResult] = []
        self.error: EngineError | None = None
        self._engine = engine
        self._requests = requests
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            self.results = self._engine.generate(self._requests)
        except EngineError as error:
            self.error = error

    def paused_after(self, count: int, requests: Sequence[GenerationRequest] | None = None) -> dict[str, int]:
        """Pause when each of `requests` (all) has written `count` tokens; how many. SGLang tells it no other way.

        On a busy machine all may have ended before a pause reaches it; then they begin again, twice at most.
        """
        watched = [request.request_id for request in requests or self._requests]
        starts = 1
        for _ in range(600):
            self._engine.pause()
            written = self._engine.num_tokens()
            if all(written.get(name, 0) >= count for name in watched):
                return written
            if not self._thread.is_alive():
                assert self.error is None, f"it ended too soon: {self.error}"
                assert starts < 3, f"it ended too soon: {self.results}"
                self._thread = self._start()
                starts += 1
            self._engine.continue_()
            time.sleep(0.05)
        raise AssertionError(f"{count} tokens were not written in half a minute")

    def join(self, seconds: float) -> list[GenerationResult]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still generating after {seconds} s"
        if self.error is not None:
            raise self.error
        return self.results
