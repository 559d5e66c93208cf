"""A real engine under the driver's stream, in this process: it writes for longer than a stall, and then it hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.observability.ledger import DrawLedger
from dovetail.observability.stalls import StalledError
from dovetail.rollout.base import RolloutEngine, SamplingParams
from dovetail.trainer.rollout_stream import RolloutStream
from dovetail.workers.rollout_worker import RolloutWorker
from tests.rollout.test_native_engine import requests
from tests.trainer.toy_run import Toy, numbered_prompts

GROUPS, SAMPLES, LENGTH = 4, 4, 480


class _Alone:
    """Stands for `SeparateEngines` and their group: one worker in this process."""

    num_restarts = 0

    def __init__(self, worker: RolloutWorker) -> None:
        self.group = self
        self._worker = worker

    def dp_size(self, mesh: str) -> int:
        return 1

    def weights_changed(self, version: int) -> None: ...

    def bring_up_to_date(self) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: [getattr(self._worker, name)(*args)]


def check_stalls(engine: RolloutEngine, folder: Path, run: Path, server_pids: list[int]) -> None:
    """Responses that take longer than a stall may last arrive; servers that are stopped are a stall within the limit.

    `folder` is the engine's model, of a context of 512 tokens. How fast it writes depends on what else the machine
    does, so the limit is a part of the time that it takes for the same responses.
    """
    began = time.monotonic()
    engine.generate(requests([[5, 6]] * GROUPS, SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, n=SAMPLES)))
    stall_s = 0.4 * (time.monotonic() - began)
    changes = {
        "data.max_response_length": LENGTH,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 0,
        "async_training.stall_timeout_s": stall_s,
    }
    config = Toy(folder, folder).config(run, changes)
    worker = RolloutWorker(config)
    worker.engine, worker._has_weights, worker._pad_token_id = engine, True, 0
    groups: Any = type("Groups", (), {"engines": _Alone(worker)})()
    prompts = numbered_prompts(GROUPS, [5, 6])
    stream = RolloutStream(config, groups, DrawLedger(run), draw_prompts=prompts, total_steps=9)
    began = time.monotonic()
    assert len(stream.next(1)) == GROUPS * SAMPLES
    assert time.monotonic() - began > stall_s, "too quick to show anything"
    stream.update(1, 1)
    began = time.monotonic()
    with _stopped(server_pids), pytest.raises(StalledError, match="draw 4 waits for engine 0, its last token"):
        stream.next(2)
    assert time.monotonic() - began < 4 * stall_s
    assert worker._groups is not None
    worker._groups.close()


@contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGCONT)
