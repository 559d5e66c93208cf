"""A generation on a thread, and how to wait for its tokens."""

from __future__ import annotations

import threading

from dovetail.rollout.base import EngineError, GenerationRequest, GenerationResult, RolloutEngine
from tests.waiting import wait_until


class Running:
    def __init__(self, engine: RolloutEngine, *requests: GenerationRequest) -> None:
        self.results: list[GenerationResult] = []
        self.error: EngineError | ValueError | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, requests))
        self._thread.start()

    def _run(self, engine: RolloutEngine, requests: tuple[GenerationRequest, ...]) -> None:
        try:
            self.results = engine.generate(requests)
        except (EngineError, ValueError) as error:
            self.error = error

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still generating after {seconds} s"

    def result(self, seconds: float) -> list[GenerationResult]:
        self.join(seconds)
        if self.error is not None:
            raise self.error
        return self.results


def wait_for_tokens(engine: RolloutEngine, name: str, count: int) -> None:
    wait_until(lambda: num_tokens(engine, name) >= count, f"{count} tokens of {name!r}")


def num_tokens(engine: RolloutEngine, name: str) -> int:
    return sum(len(result.token_ids) for result in engine.partial([name]))
