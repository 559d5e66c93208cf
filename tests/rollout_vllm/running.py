"""A generation on a thread, and how to wait for its tokens."""

from __future__ import annotations

from concurrent.futures import Future

from dovetail.rollout.base import GenerationRequest, GenerationResult, RolloutEngine
from tests.waiting import on_thread, wait_until


def generating(engine: RolloutEngine, *requests: GenerationRequest) -> Future[list[GenerationResult]]:
    return on_thread(engine.generate, requests)


def wait_for_tokens(engine: RolloutEngine, name: str, count: int) -> None:
    wait_until(lambda: num_tokens(engine, name) >= count, f"{count} tokens of {name!r}")


def num_tokens(engine: RolloutEngine, name: str) -> int:
    return sum(len(result.token_ids) for result in engine.partial([name]))
