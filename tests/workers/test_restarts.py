"""Engines of several ranks that die and are started again: nothing is lost, nothing is counted twice, nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from dovetail.rollout.base import EngineDiedError, EngineError, GenerationRequest, GenerationResult, SamplingParams
from dovetail.workers.restarts import generate_together
from tests.waiting import on_thread

pytestmark = pytest.mark.unit

REQUESTS = [GenerationRequest(f"r{n}", [5 + n], SamplingParams(n=2)) for n in range(4)]


class FakeEngine:
    """Dies in its first so many calls, after it has finished one more request each time."""

    def __init__(self, num_deaths: int, restarts_left: int) -> None:
        self.restarts_left = restarts_left
        self.has_weights = True
        self.written: list[str] = []
        self._num_deaths = num_deaths

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        assert self.has_weights, "an engine must not generate before its weights are back"
        if self._num_deaths:
            self._num_deaths -= 1
            finished = {request.request_id: self._write(request) for request in requests[:1]}
            raise EngineDiedError("its process is gone.", finished)
        return [result for request in requests for result in self._write(request)]

    def restart(self, error: EngineDiedError) -> None:
        self.restarts_left -= 1
        self.has_weights = False

    def _write(self, request: GenerationRequest) -> list[GenerationResult]:
        self.written.append(request.request_id)
        return [GenerationResult(request.request_id, n, [n], [0.0], "stop", [1]) for n in range(2)]


def play(engines: list[FakeEngine]) -> list[list[GenerationResult] | EngineError]:
    """Each engine on a thread of its own, as ranks that hear each other."""
    barrier = threading.Barrier(len(engines), timeout=20)
    words = [""] * len(engines)

    def gather_of(rank: int) -> Callable[[str], Sequence[str]]:
        def gather(word: str) -> Sequence[str]:
            words[rank] = word
            barrier.wait()
            found = list(words)
            barrier.wait()
            return found

        return gather

    def run(rank: int) -> list[GenerationResult] | EngineError:
        engine = engines[rank]

        def reload(mine: bool) -> None:
            barrier.wait()  # gathering takes all ranks
            engine.has_weights = engine.has_weights or mine

        try:
            return generate_together(engine, REQUESTS, reload=reload, gather=gather_of(rank))
        except EngineError as error:
            return error

    running = [on_thread(run, rank) for rank in range(len(engines))]
    return [outcome.result(30) for outcome in running]


@pytest.mark.parametrize("deaths", [(0, 0), (0, 1), (2, 1), (1, 0, 2)])
def test_every_request_is_answered_once_whoever_dies(deaths: tuple[int, ...]) -> None:
    engines = [FakeEngine(count, restarts_left=2) for count in deaths]
    for outcome, engine, count in zip(play(engines), engines, deaths, strict=True):
        assert not isinstance(outcome, EngineError)
        assert [(result.request_id, result.sample_index) for result in outcome] == [
            (request.request_id, n) for request in REQUESTS for n in range(2)
        ]
        assert sorted(engine.written) == [request.request_id for request in REQUESTS], "what was finished is kept"
        assert engine.restarts_left == 2 - count


def test_without_a_restart_left_every_rank_says_which_one_it_was() -> None:
    outcomes = play([FakeEngine(0, 1), FakeEngine(2, 1), FakeEngine(0, 1)])
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert all("rank 1: no restart is left: its process is gone." in str(outcome) for outcome in outcomes)
