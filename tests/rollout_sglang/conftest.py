"""Real SGLang servers, started with the Python that DOVETAIL_SGLANG_PYTHON names (`make sglang-env`), as a trainer
would. Without it there is no SGLang to test. Servers are started once: each costs seconds of imports."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.rollout.base import EngineError, GenerationRequest, GenerationResult
from dovetail.rollout.sglang import SGLangRollout, SGLangSettings
from dovetail.rollout.sglang.environment import PYTHON_VARIABLE
from tests.models.tiny import save_tiny_model
from tests.waiting import wait_until

needs_sglang = pytest.mark.skipif(
    PYTHON_VARIABLE not in os.environ, reason=f"no SGLang: `make sglang-env`, and its Python in {PYTHON_VARIABLE}"
)


def small_settings(folder: Path | str, **overrides: Any) -> SGLangSettings:
    defaults = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 512}
    kwargs = {"max_total_tokens": 4096}
    return SGLangSettings(str(folder), **{**defaults, "engine_kwargs": kwargs, **overrides})


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama_tied", tmp_path_factory.mktemp("models") / "llama_tied")


@pytest.fixture(scope="package")
def _engines(tiny_folder: Path) -> Iterator[list[SGLangRollout]]:
    engines: list[SGLangRollout] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(_engines: list[SGLangRollout], tiny_folder: Path) -> SGLangRollout:
    """Two servers behind the router, of a model with tied embeddings. Started again where a test before has killed
    them."""
    if _engines and (_engines[0]._closed or _engines[0].deaths):
        _engines.pop().close()
    if not _engines:
        settings = small_settings(tiny_folder)
        _engines.append(SGLangRollout(settings, num_servers=2, bucket_bytes=1 << 18))
    return _engines[0]


def num_tokens(engine: SGLangRollout) -> dict[str, int]:
    """What each running request has written in calls that have ended."""
    counts: Counter[str] = Counter()
    for result in engine.partial():
        counts[result.request_id] += len(result.token_ids)
    return dict(counts)


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
        starts = iter(range(2))

        def written() -> dict[str, int]:
            self._engine.pause()
            counts = num_tokens(self._engine)
            if all(counts.get(name, 0) >= count for name in watched):
                return counts
            if not self._thread.is_alive():
                assert self.error is None, f"it ended too soon: {self.error}"
                assert next(starts, None) is not None, f"it ended too soon: {self.results}"
                self._thread = self._start()
            self._engine.continue_()
            return {}

        return wait_until(written, f"{count} tokens of {watched}")

    def join(self, seconds: float) -> list[GenerationResult]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still generating after {seconds} s"
        if self.error is not None:
            raise self.error
        return self.results
